"""Supervised finetuning on the answers of conversations, as an objective of the trainer."""

import json
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import Dataset
from mtjax.data.samples.sample import stack
from mtjax.data.tokens.folder import DESCRIPTIONS, GENERATION_CONFIG
from mtjax.data.tokens.pretrained_settings import read_object
from mtjax.data.tokens.template_files import DEFAULT, TEMPLATE_FILE, TEMPLATE_FOLDER, template_files
from mtjax.errors import UserError
from mtjax.finetune.chat_encoding import SEVERAL, ChatEncoder, EncodedSample
from mtjax.finetune.chat_rows import Chat, read_chats
from mtjax.finetune.chat_samples import PackedChats, truncation_notes
from mtjax.finetune.files import read_task
from mtjax.finetune.options import CHAT
from mtjax.finetune.passages import PassageEncoder, have_passages, pack_rows, reading
from mtjax.finetune.pretrained import FinetuningObjective, FinetuningTokenizer
from mtjax.finetune.rows import SHOWN, Examples
from mtjax.finetune.rows_read import rows_read
from mtjax.finetune.tasks.task import DEV, HeldOut
from mtjax.generate.chat import ChatTemplate
from mtjax.runtime.checkpoints.past import Past
from mtjax.runtime.processes.notes import say_notes
from mtjax.sharding.global_batch import global_batch, process_rows
from mtjax.train.folder.tokenizer import read_files
from mtjax.train.objective import RunData
from mtjax.train.observability.best import Goal
from mtjax.train.step import TrainStep

LABELLED = ("class_weights", "text_fields", "label_field", "labels")
"""Settings of tasks whose rows have labels."""


@dataclass(frozen=True)
class ChatFiles:
    """Names of the files of conversations, for `read_task`."""

    name: str = CHAT
    train: tuple[str, ...] = ("train",)
    held_out: tuple[HeldOut, ...] = (DEV,)
    endings: tuple[str, ...] = (".jsonl", ".json")

    def examples(self, path: Path, config: Config) -> Examples:
        """Reads the conversations of a file."""
        return read_chats(path, with_passages=config.model.family == "retro")


class ChatFinetuning(FinetuningObjective):
    """The objective of supervised finetuning: next-token prediction on answers; prompts are masked."""

    def load_data(
        self, config: Config, folder: Path, past: Past | None = None, allowed: Collection[str] = ()
    ) -> tuple[Config, RunData]:
        """Reads the conversations, and fills steps and sequence length into the config.

        Raises:
          UserError: rows, template or tokenizer are invalid.
        """
        given = [name for name in LABELLED if getattr(config.finetuning, name) is not None]
        if given:
            raise UserError(
                f"--{given[0].replace('_', '-')} has no effect on --task {CHAT}, whose rows have no labels: remove it"
            )
        found = self.open_tokenizer(config, folder)
        tokenizer, template = found.tokenizer, _template_file(config.finetuning.chat_template, found)
        passages = PassageEncoder(tokenizer, config.model)
        encoder = ChatEncoder(tokenizer, ChatTemplate.of(found.folder, template), passages)
        rows = read_task(config, ChatFiles())
        notes, counts = list(rows.notes), Counter[str]()
        sets = (rows.train, rows.held_out[0][1])
        train, held_out = (self._encoded(chats, encoder, notes, counts) for chats in sets)
        read = rows_read(config, train, held_out)
        notes += [f"{count:,} conversations {remark}" for remark, count in sorted(counts.items())]
        limit = config.model.sequence_length
        reads = have_passages([*train, *held_out])
        # Padding may be any id: it is a segment of its own, without loss.
        pack = partial(pack_rows, model=config.model, pad=tokenizer.eod, with_passages=reads)
        packed = pack(train, length=limit)
        if not len(packed):
            raise UserError(f"no training row has an answer within the first {limit} tokens: raise --sequence-length")
        # Packed once with the maximum length; the sequence length is then reduced to what the packs need.
        # Validation rows need not be packed as long as training's, but each must fit.
        longest = max([packed.longest, *(packed.tokens_taken(chat) for chat in held_out)])
        config = configs.replace(
            self.with_steps(self.with_text(config, longest, found.name, tokenizer), len(packed), folder, past),
            # Conversations of a sequence are independent: without these two, each would read those packed before it.
            reset_position_ids=True,
            reset_attention_mask=True,
            **reading(config.model, train=packed.chats, reads=reads),
        )
        config = self.teacher.checked(config, tokenizer) if self.teacher else config
        unit = "samples" if SEVERAL in counts else "conversations"
        self._print_notes(notes, [*train, *held_out], packed, limit, unit)
        length = config.model.sequence_length
        packed, validation = (pack(chats, length=length) for chats in (train, held_out))
        if not len(validation):
            raise UserError(f"no validation row has an answer within the first {limit} tokens: raise --sequence-length")
        # A resumed run compares these: rows, or how they are packed, must not have changed.
        lengths = [len(chat.ids) for chat in packed.chats] + [len(numbers) for numbers in packed.packs]
        lengths += [zlib.crc32(chat.passages.tobytes()) for chat in packed.chats if chat.passages is not None]
        ordered, position = self.in_order(config, packed, lengths, past, allowed)
        files = self._tokenizer_files(found, encoder, template)
        return config, RunData(tokenizer, ordered, validation, position, files, found.is_saved, found.name, read)

    def validate(self, program: TrainStep, parameters: Any, held_out: Dataset) -> dict[str, float]:
        """Returns the mean loss per trained token over all validation conversations."""
        size = program.config.training.global_batch_size
        mine, blank = process_rows(program.batch_sharding, size), held_out[0]
        blank = blank | {"loss_mask": np.zeros_like(blank["loss_mask"])}  # pads the last batch
        total = tokens = 0.0
        for start in range(0, len(held_out), size):
            local = stack([held_out[int(k)] if k < len(held_out) else blank for k in start + mine])
            local["sample_index"] = np.zeros(len(mine), np.uint32)
            batch = global_batch(program.batch_sharding, {n: local[n] for n in program.batch_names}, size)
            ((loss, weight),) = program.evaluation(parameters, batch).values()
            # Sums of losses and of weights: a mean of batches would weigh tokens of short ones more.
            total, tokens = total + float(loss), tokens + float(weight)
        return {"valid_loss": total / tokens}

    def goal(self, config: Config) -> Goal:
        """Returns the goal: the lowest validation loss."""
        return Goal("valid_loss", higher_is_better=False, patience=config.finetuning.patience)

    def next_commands(self, config: Config, out: str) -> list[str]:
        """Returns commands that chat with the model, or train it longer."""
        if config.model.family == "retro":
            return [f"mtjax generate --from {out} --input PROMPTS.jsonl", *super().next_commands(config, out)]
        return [f"mtjax generate --from {out} --interactive", *super().next_commands(config, out)]

    def _encoded(
        self, chats: Sequence[Chat], encoder: ChatEncoder, notes: list[str], counts: Counter[str]
    ) -> list[EncodedSample]:
        """Encodes conversations; drops those that can't be encoded, with a note.

        Args:
          chats: conversations of one file.
          encoder: the encoder.
          notes: notes are added to it.
          counts: numbers of conversations with each remark of the encoder are added to it.

        Raises:
          UserError: most of them can't be encoded.
        """
        encoded: list[EncodedSample] = []
        errors: list[str] = []
        for chat in chats:
            try:
                samples, remarks = encoder.samples(chat)
            except UserError as e:
                errors.append(f"line {chat.line} of {chat.file}: {e}")
                continue
            encoded += samples
            counts.update(remarks)
        if errors:
            more = f"; and {len(errors) - SHOWN:,} more" if len(errors) > SHOWN else ""
            note = f"{len(errors):,} of {len(chats):,} rows are skipped: {'; '.join(errors[:SHOWN])}{more}"
            # The rule of `Examples.check`: most rows failing means the wrong file, or template.
            if 2 * len(errors) > len(chats):
                raise UserError(note)
            notes.append(note)
        return encoded

    def _print_notes(
        self, notes: list[str], samples: Sequence[EncodedSample], packed: PackedChats, limit: int, unit: str
    ) -> None:
        """Prints notes on truncated samples and on the number of trained tokens."""
        notes += truncation_notes(samples, limit, unit)
        trained = sum(int(chat.trained[1:].sum()) for chat in packed.chats)
        notes.append(f"{len(packed.chats):,} {unit} with {trained:,} trained tokens in {len(packed):,} sequences")
        say_notes(notes)

    def _tokenizer_files(
        self, found: FinetuningTokenizer, encoder: ChatEncoder, template: Path | None
    ) -> dict[str, bytes]:
        """Returns the files with which `mtjax generate`, and transformers after an export, render the same prompts."""
        if found.is_saved:
            return {}
        files = read_files(found.folder, DESCRIPTIONS) | dict(found.files)
        # The templates that were trained with replace those of the weights.
        files = {name: content for name, content in files.items() if not name.endswith(".jinja")}
        templates = {DEFAULT: template} if template else template_files(found.folder)
        for name, path in templates.items():
            files[TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja"] = path.read_bytes()
        # Without the token that ends an answer, generation would go on with the user's next turn.
        settings = read_object(found.folder / GENERATION_CONFIG) | {"eos_token_id": encoder.ends}
        return files | {GENERATION_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}


def _template_file(named: str | None, found: FinetuningTokenizer) -> Path | None:
    """Returns the file that `--chat-template` names; None if the template in the tokenizer's folder is used.

    Raises:
      UserError: a resumed run has another template.
    """
    path = Path(named).expanduser() if named else None
    saved = found.folder / TEMPLATE_FILE
    if not found.is_saved or path is None or not saved.is_file():
        return path
    if path.is_file() and path.read_bytes() != saved.read_bytes():
        raise UserError(
            f"--chat-template {named} is not the template that the run was trained with, {saved}: remove chat_template "
            "from the command and the config to continue with the run's template, or start a new run in another --out"
        )
    return None
