"""Supervised finetuning: a decoder learns the answers of conversations, as an objective of the trainer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import Dataset
from mtjax.data.progress import say
from mtjax.data.samples.sample import stack
from mtjax.data.tokens.folder import DESCRIPTIONS, GENERATION_CONFIG
from mtjax.errors import UserError
from mtjax.finetune.chat_rows import Chat, read_chats
from mtjax.finetune.chat_samples import ChatEncoder, PackedChats, Written
from mtjax.finetune.files import read_task
from mtjax.finetune.options import CHAT
from mtjax.finetune.pretrained import FinetuningTokenizer, OnPretrained
from mtjax.finetune.rows import SHOWN, Examples
from mtjax.finetune.samples import Epochs
from mtjax.finetune.tasks.task import DEV, HeldOut
from mtjax.generate.chat import TEMPLATE_FILE, ChatTemplate
from mtjax.generate.weights import read_json
from mtjax.sharding.placement import global_batch, process_rows
from mtjax.train.folder.tokenizer import read_files
from mtjax.train.objective import Text
from mtjax.train.processes.exchange import this_process
from mtjax.train.step import Program
from mtjax.train.watch.best import Goal

LABELLED = ("class_weights", "text_fields", "label_field", "labels")
"""Settings of tasks whose rows have labels."""


@dataclass(frozen=True)
class ChatFiles:
    """Where conversations are, as `read_task` asks it."""

    name: str = CHAT
    train: tuple[str, ...] = ("train",)
    held_out: tuple[HeldOut, ...] = (DEV,)
    endings: tuple[str, ...] = (".jsonl", ".json")

    def examples(self, path: Path, config: Config) -> Examples:
        """The conversations of a file."""
        return read_chats(path)


class Chatting(OnPretrained):
    """The answers of conversations, learnt token by token; what is asked is read, not learnt."""

    def open_text(self, config: Config, folder: Path) -> tuple[Config, Text]:
        """The conversations, and the config with steps and length filled in.

        Raises:
          UserError: rows, template or tokenizer can't be used.
        """
        given = [name for name in LABELLED if getattr(config.finetuning, name) is not None]
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} has no effect on the task {CHAT}: its rows have no labels")
        found = self.open_tokenizer(config, folder)
        tokenizer, template = found.tokenizer, _template_file(config.finetuning.chat_template, found)
        encoder = ChatEncoder(tokenizer, ChatTemplate.of(found.folder, template))
        rows = read_task(config, ChatFiles())
        notes = list(rows.notes)
        train, held_out = (self._written(part, encoder, notes) for part in (rows.train, rows.held_out[0][1]))
        limit = config.model.sequence_length
        packed = PackedChats.of(train, limit, tokenizer.eod)
        if not len(packed):
            raise UserError(f"no answer of the training rows begins within {limit} tokens: raise --sequence-length")
        longest = max(sum(len(packed.chats[i].ids) - 1 for i in pack) for pack in packed.packs)
        longest = max([longest, *(len(chat.ids) - 1 for chat in held_out)])
        config = configs.replace(
            self.with_steps(self.with_text(config, longest, found.name, tokenizer), len(packed), folder),
            reset_position_ids=True,
            reset_attention_mask=True,
        )
        config = self.teacher.checked(config, tokenizer) if self.teacher else config
        self._say(notes, [*train, *held_out], packed, limit)
        length, seed = config.model.sequence_length, config.training.seed
        packed, validation = (PackedChats.of(part, length, tokenizer.eod) for part in (train, held_out))
        if not len(validation):
            raise UserError(f"no answer of the validation rows begins within {limit} tokens: raise --sequence-length")
        count = config.training.steps * config.training.global_batch_size
        passes, files = Epochs(packed, seed, count), self._kept(found, encoder, template)
        return config, Text(tokenizer, passes, validation, files, found.is_kept)

    def validate(self, program: Program, parameters: Any, held_out: Dataset) -> dict[str, float]:
        """The mean loss of a token of the answers held out, all of them."""
        size = program.config.training.global_batch_size
        mine, blank = process_rows(program.batch_sharding, size), held_out[0]
        blank = blank | {"loss_mask": np.zeros_like(blank["loss_mask"])}  # fills the last batch
        total = tokens = 0.0
        for start in range(0, len(held_out), size):
            local = stack([held_out[int(k)] if k < len(held_out) else blank for k in start + mine])
            local["sample_index"] = np.zeros(len(mine), np.uint32)
            batch = global_batch(program.batch_sharding, {n: local[n] for n in program.batch_names}, size)
            ((loss, weight),) = program.evaluate(parameters, batch).values()
            total, tokens = total + float(loss), tokens + float(weight)
        return {"valid_loss": total / tokens}

    def goal(self, config: Config) -> Goal:
        """The least validation loss."""
        return Goal("valid_loss", higher_is_better=False, patience=config.finetuning.patience)

    def next_commands(self, config: Config, out: str) -> list[str]:
        """A conversation with it, or longer."""
        return [f"mtjax generate --from {out} --interactive", *super().next_commands(config, out)]

    def _written(self, chats: Sequence[Chat], encoder: ChatEncoder, notes: list[str]) -> list[Written]:
        """The tokens of conversations; those that the template refuses are left out, and noted.

        Raises:
          UserError: it refuses most of them.
        """
        written, refused = [], []
        for chat in chats:
            try:
                written.append(encoder(chat))
            except UserError as e:
                refused.append(f"line {chat.line}: {e}")
        if refused:
            more = f"; and {len(refused) - SHOWN:,} more" if len(refused) > SHOWN else ""
            note = f"{len(refused):,} of {len(chats):,} rows are left out: {'; '.join(refused[:SHOWN])}{more}"
            if len(refused) > len(written):
                raise UserError(note)
            notes.append(note)
        return written

    def _say(self, notes: list[str], chats: Sequence[Written], packed: PackedChats, limit: int) -> None:
        if this_process():
            return
        if cut := sum(len(chat.ids) - 1 > limit for chat in chats):
            notes.append(f"{cut:,} of {len(chats):,} conversations are longer than {limit} tokens, and are cut")
        learnt = sum(int(chat.learnt[1:].sum()) for chat in packed.chats)
        notes.append(
            f"{len(packed.chats):,} conversations with {learnt:,} tokens of answers in {len(packed):,} sequences"
        )
        for note in notes:
            say(f"note    {note}")

    def _kept(self, found: FinetuningTokenizer, encoder: ChatEncoder, template: Path | None) -> dict[str, bytes]:
        """Files by which `mtjax generate`, and transformers after an export, write conversations in the same way."""
        kept = read_files(found.folder, DESCRIPTIONS) | dict(found.files)
        if template:
            kept[TEMPLATE_FILE] = template.read_bytes()
        settings = read_json(found.folder / GENERATION_CONFIG) | {"eos_token_id": encoder.ends}
        return kept | {GENERATION_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}


def _template_file(named: str | None, found: FinetuningTokenizer) -> Path | None:
    """The file that `--chat-template` names; None where the template beside the tokenizer is to be read.

    Raises:
      UserError: a resumed run has another template.
    """
    path = Path(named).expanduser() if named else None
    own = found.folder / TEMPLATE_FILE
    if not found.is_kept or path is None or not own.is_file():
        return path
    if path.is_file() and path.read_bytes() != own.read_bytes():
        raise UserError(
            f"--chat-template {named} is not the template that the run was trained with, {own}: remove chat_template "
            "from the command and the config to go on with the run's own, or start a new run in another --out"
        )
    return None
