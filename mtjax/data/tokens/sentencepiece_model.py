"""SentencePiece's model files as models of the `tokenizers` library; needs the extra `data`.

The `tokenizers` library has no reader for them: vocabulary, scores and settings are in a protocol buffer, whose
description comes with the library `sentencepiece`.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mtjax.errors import UserError, require

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a space in its pieces."""
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of pieces, as sentencepiece_model.proto numbers them."""
UNIGRAM = 1
"""The type of a Unigram model there."""


@dataclass(frozen=True)
class SentencePieceModel:
    """A model file.

    Attributes:
      proto: the protocol buffer `ModelProto`.
    """

    proto: Any

    @classmethod
    def read(cls, path: Path) -> "SentencePieceModel":
        """Reads a model file.

        Raises:
          UserError: it is not one, or sentencepiece is not installed.
        """
        require("sentencepiece", "data")
        proto = require("sentencepiece.sentencepiece_model_pb2", "data").ModelProto()
        try:
            proto.ParseFromString(path.read_bytes())
        except Exception as e:  # protobuf's error class depends on its implementation
            raise UserError(f"{path} is not a SentencePiece model: {e}") from e
        if not proto.pieces:
            raise UserError(f"{path} is not a SentencePiece model: it has no pieces")
        return cls(proto)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by piece."""
        return {piece.piece: index for index, piece in enumerate(self.proto.pieces)}

    @property
    def scores(self) -> list[tuple[str, float]]:
        """Pieces and their scores, by id."""
        return [(piece.piece, piece.score) for piece in self.proto.pieces]

    @property
    def character_map(self) -> bytes | None:
        """The compiled rules by which characters are normalized; None where there are none."""
        return self.proto.normalizer_spec.precompiled_charsmap or None

    @property
    def declared(self) -> list[AddedToken]:
        """Control pieces, which are special tokens, and pieces that the user defined."""
        return [
            AddedToken(piece.piece, normalized=False, special=piece.type == CONTROL)
            for piece in self.proto.pieces
            if piece.type in (CONTROL, USER_DEFINED)
        ]

    def merges_by_id(self) -> list[tuple[str, str]]:
        """Returns all pairs of pieces that together are a piece, the piece with the lowest id first."""
        ids, merges = self.ids, []
        for piece, index in ids.items():
            cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
            merges += [(index, len(a), len(b), ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
        return [(merge[-2], merge[-1]) for merge in sorted(merges)]

    def tokenizer(self, names: dict[int, str], *, legacy: bool) -> Tokenizer:
        """Builds a tokenizer that follows the settings in the file, as transformers' general class does.

        Args:
          names: other names of pieces, by id.
          legacy: whether each part of a text between special tokens begins with a space, or only the first.
        """
        proto, normalizing = self.proto, self.proto.normalizer_spec
        pieces: list[str]
        if proto.trainer_spec.model_type == UNIGRAM:
            pieces = [piece.piece for piece in proto.pieces]
        else:
            remaining = {piece for piece, index in self.ids.items() if index not in names}
            renamed = {index: name for index, name in names.items() if name not in remaining}
            pieces = [renamed.get(index, str(piece.piece)) for index, piece in enumerate(proto.pieces)]
        defined = [piece for piece, entry in zip(pieces, proto.pieces, strict=True) if entry.type == USER_DEFINED]
        tokenizer = Tokenizer(self._model(pieces, has_defined=bool(defined)))
        tokenizer.normalizer = self._normalizer(legacy=legacy)
        before: list[pre_tokenizers.PreTokenizer] = []
        if normalizing.add_dummy_prefix:
            scheme = "always" if legacy else "first"
            before.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False))
        if defined:  # SentencePiece never merges them with their neighbours
            pattern = "|".join(re.escape(piece) for piece in sorted(defined, key=len, reverse=True))
            before.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
        if before:
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
        tokenizer.decoder = self._decoder()
        return tokenizer

    def _model(self, pieces: list[str], *, has_defined: bool) -> models.Model:
        proto, trained = self.proto, self.proto.trainer_spec
        if trained.model_type == UNIGRAM:
            return models.Unigram(self.scores, unk_id=trained.unk_id, byte_fallback=trained.byte_fallback)
        ranks = {
            name: (piece.score, index)
            for index, (name, piece) in enumerate(zip(pieces, proto.pieces, strict=True))
            # Special and byte pieces are never the result of a merge.
            if piece.type == NORMAL
        }
        merges = []
        for name, (score, index) in ranks.items():
            cuts = [(name[:at], name[at:]) for at in range(1, len(name))]
            merges += [(-score, index, a, b) for a, b in cuts if a in ranks and b in ranks]
        return models.BPE(  # pyright: ignore[reportCallIssue]
            vocab={name: index for index, name in enumerate(pieces)},
            merges=[(a, b) for _, _, a, b in sorted(merges)],
            unk_token=trained.unk_piece,
            fuse_unk=True,
            byte_fallback=trained.byte_fallback,
            dropout=None,
            # A word that is a piece itself, such as a defined one, is then not merged from its characters.
            ignore_merges=has_defined,
        )

    def _normalizer(self, *, legacy: bool) -> normalizers.Normalizer:
        settings = self.proto.normalizer_spec
        steps: list[normalizers.Normalizer] = []
        if self.character_map:
            steps.append(normalizers.Precompiled(self.character_map))
        if settings.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if settings.escape_whitespaces:
            steps.append(normalizers.Replace(" ", SPACE))
        if settings.add_dummy_prefix and legacy:
            # The pre-tokenizer puts no space in front of a text that begins with one; SentencePiece does.
            steps.append(normalizers.Replace(Regex(rf"\A{SPACE}"), 2 * SPACE))
        return normalizers.Sequence(steps)

    def _decoder(self) -> decoders.Decoder:
        steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
        bytes_too, prefixed = self.proto.trainer_spec.byte_fallback, self.proto.normalizer_spec.add_dummy_prefix
        if bytes_too:
            steps.append(decoders.ByteFallback())
        if bytes_too or prefixed:
            steps.append(decoders.Fuse())
        if prefixed:
            steps.append(decoders.Strip(content=" ", left=1))
        return decoders.Sequence(steps)
