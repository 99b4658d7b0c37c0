"""Subwords, by the `tokenizers` library: others' tokenizers, and BPE trained here.

Neither adds tokens at the beginning of a text. Text that spells a special token gives
that token, as it does in Hugging Face's own libraries.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32
from numpy.typing import ArrayLike
from tokenizers import decoders, models, pre_tokenizers, trainers

from mtpjax import fields
from mtpjax.data import splits
from mtpjax.data.sources import DataError, Document
from mtpjax.data.tokenizer import as_text, check_ids, digest

# Without a choice the library warns in every process that is forked after its first
# use. Texts are encoded one by one, where threads are no help.
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

# Roles of special tokens, by what they are called beside a tokenizer.json.
_ROLES = {'begin': 'bos', 'end': 'eos', 'pad': 'pad', 'unknown': 'unk'}
_BESIDE = ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json')


@dataclasses.dataclass(frozen=True)
class HuggingFace:
  """A tokenizer.json. Whether a text comes back as it was is up to that file.

  Attributes:
    definition: what is in the file, without truncation, padding and dropout.
    special: ids of the special tokens whose role is known; 'end' ends a document.

  Raises:
    DataError: the definition is none, or an id is outside the vocabulary.
  """

  definition: dict[str, Any]
  special: dict[str, int]

  @dataclasses.dataclass
  class Config:
    """A tokenizer made by others.

    Roles are read from tokenizer_config.json, special_tokens_map.json and
    generation_config.json beside the file, each from the first of them that has it.

    Attributes:
      file: a tokenizer.json, or the folder that holds one.
      end: the token that ends a document. None: the one whose role that is.
    """

    file: str
    end: str | None = None

    def build(
      self, documents: Iterable[Document], heldout: Iterable[Document] = ()
    ) -> 'HuggingFace':
      """The documents are not looked at. Raises DataError on files that do not fit."""
      del documents, heldout
      path = Path(self.file).expanduser()
      if path.is_dir():
        path = path / 'tokenizer.json'
        others = sorted(p.name for p in path.parent.glob('*') if 'token' in p.name)
        if not path.exists():
          raise DataError(
            f'tokenizer.file={self.file!r}: no tokenizer.json there, only '
            f'{", ".join(others) or "other files"}; make one with transformers: '
            'AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)'
          )
      built = HuggingFace(_read(path), {})  # large ones take seconds: only once
      built.special.update(_roles(path.parent, built, self.end is None))
      if self.end is not None:
        built.special['end'] = built.id_of(self.end, 'tokenizer.end')
      return built

  def __post_init__(self):
    plain = {**self.definition, 'truncation': None, 'padding': None}
    if isinstance(plain.get('model'), dict) and plain['model'].get('dropout'):
      plain['model'] = {**plain['model'], 'dropout': None}
    object.__setattr__(self, 'definition', plain)
    if not self.vocabulary:
      raise DataError('tokenizer: it has no token; give one that was trained')
    size = self.vocab_size
    for role, number in self.special.items():
      if not 0 <= number < size:
        raise DataError(f'special {role!r}={number} is outside the {size} tokens')

  @property
  def end(self) -> int | None:
    return self.special.get('end')

  @property
  def vocab_size(self) -> int:
    """The largest id and one: ids may have holes."""
    return self._size

  @property
  def fingerprint(self) -> str:
    return self._fingerprint

  @property
  def bytes_per_token(self) -> Int32[np.ndarray, 'V']:
    """Of the token's text after other text; 0 for special tokens and holes."""
    return self._sizes

  @property
  def token_bytes(self) -> tuple[bytes, ...]:
    """Special tokens as they are spelt, for `decode` writes them; b'' for holes."""
    return self._spelt

  def encode(
    self, text: str | bytes, where: str = 'the text'
  ) -> Int32[np.ndarray, 'T']:
    """Ids of the text. Raises DataError on what is not UTF-8."""
    text = as_text(text, where)
    try:
      found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except Exception as error:  # the library's own, without a class
      raise DataError(f'{where}: {error}; use a tokenizer that knows it') from None
    return np.array(found[0].ids, np.int32)

  def decode(self, ids: ArrayLike) -> str:
    """Text of ids [T], special tokens as they are spelt; non-UTF-8 becomes U+FFFD.

    Raises DataError on an id outside the vocabulary.
    """
    numbers = check_ids(ids, self.vocab_size).tolist()
    return self._tokenizer.decode(numbers, skip_special_tokens=False)

  def to_json(self) -> str:
    """All of it, so that a checkpoint needs no other file."""
    found = {'definition': self.definition, 'special': self.special}
    return json.dumps(
      {'kind': 'huggingface', **found}, sort_keys=True, ensure_ascii=False
    )

  def id_of(self, token: str, field: str) -> int:
    """The token's id. Raises DataError with the nearest special tokens."""
    if token not in self.vocabulary:
      added = self._tokenizer.get_added_tokens_decoder().values()
      fix = fields.suggest(token, [one.content for one in added])
      raise DataError(f'{field}={token!r} is no token of the vocabulary; {fix}')
    return self.vocabulary[token]

  @functools.cached_property
  def vocabulary(self) -> dict[str, int]:
    """Ids of all tokens, as the file spells them."""
    return self._tokenizer.get_vocab(with_added_tokens=True)

  @functools.cached_property
  def _tokenizer(self) -> tokenizers.Tokenizer:
    try:
      return tokenizers.Tokenizer.from_str(json.dumps(self.definition))
    except Exception as error:  # the library's own, without a class
      raise DataError(
        f'tokenizer: not what a tokenizer.json holds ({error}); give one that '
        f'tokenizers {tokenizers.__version__} reads'
      ) from None

  @functools.cached_property
  def _size(self) -> int:
    return 1 + max(self.vocabulary.values())

  @functools.cached_property
  def _fingerprint(self) -> str:
    return digest(self.to_json())

  @functools.cached_property
  def _sizes(self) -> np.ndarray:
    sizes = np.zeros(self.vocab_size, np.int32)
    added = self._tokenizer.get_added_tokens_decoder()
    kinds = _kinds(self.definition.get('decoder'))
    if 'ByteLevel' in kinds:
      # A character stands for a byte, but in what was added for itself.
      for token, n in self.vocabulary.items():
        sizes[n] = len(token.encode() if n in added else token)
    else:
      # Some decoders drop a space at the start: behind a token no start is left.
      decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
      first = min(self.vocabulary.values())
      before = len(decode([first]).encode())
      for token, n in self.vocabulary.items():
        byte = 'ByteFallback' in kinds and re.fullmatch('<0x[0-9A-F]{2}>', token)
        sizes[n] = 1 if byte else max(0, len(decode([first, n]).encode()) - before)
    sizes[[n for n, token in added.items() if token.special]] = 0
    return sizes

  @functools.cached_property
  def _spelt(self) -> tuple[bytes, ...]:
    spelt = [b''] * self.vocab_size
    kinds = _kinds(self.definition.get('decoder'))
    if 'ByteLevel' in kinds:
      # As the library decodes: a token that is all stand-ins for bytes is those bytes.
      stand_ins = _stand_ins()
      for token, n in self.vocabulary.items():
        known = all(c in stand_ins for c in token)
        spelt[n] = bytes(stand_ins[c] for c in token) if known else token.encode()
      return tuple(spelt)
    first = min(self.vocabulary.values())
    numbers = [[first], *([first, n] for n in self.vocabulary.values())]
    texts = self._tokenizer.decode_batch(numbers, skip_special_tokens=False)
    before = len(texts[0].encode())
    for (token, n), text in zip(self.vocabulary.items(), texts[1:], strict=True):
      byte = 'ByteFallback' in kinds and re.fullmatch('<0x[0-9A-F]{2}>', token)
      spelt[n] = bytes([int(token[3:5], 16)]) if byte else text.encode()[before:]
    return tuple(spelt)


class Bpe:
  """Byte-level BPE trained on the training documents, which gives a `HuggingFace`.

  Any text in any language comes back as it was. The same documents give the same
  tokenizer.
  """

  @dataclasses.dataclass
  class Config:
    """How it is trained.

    Attributes:
      vocab: tokens at most, `end` and the 256 bytes among them; fewer if the documents
        have fewer pairs that occur twice.
      end: spelling of the token that ends a document, not to occur in one; None: none.
    """

    vocab: int = 4096
    end: str | None = '<|end|>'

    def build(
      self, documents: Iterable[Document], heldout: Iterable[Document] = ()
    ) -> HuggingFace:
      """Held-out documents are not looked at.

      Raises:
        DataError: a vocabulary too small, an `end` that text or bytes could spell, or
          no text.
      """
      del heldout
      spelt = [] if self.end is None else [self.end]
      if self.vocab < 256 + len(spelt):
        raise DataError(
          f'tokenizer.vocab={self.vocab}: 256 bytes and {len(spelt)} special tokens '
          f'are in it; use at least {256 + len(spelt)}'
        )
      if self.end is not None and not (len(self.end) > 1 and self.end.isascii()):
        raise DataError(
          f'tokenizer.end={self.end!r}: text could spell it; use several ASCII '
          "characters, such as '<|end|>'"
        )
      made = tokenizers.Tokenizer(models.BPE())
      made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
      made.decoder = decoders.ByteLevel()  # pyright: ignore
      trainer = trainers.BpeTrainer(
        vocab_size=self.vocab,
        min_frequency=2,
        special_tokens=spelt,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
      )
      made.train_from_iterator(_texts(self, documents), trainer)
      built = HuggingFace(json.loads(made.to_str()), {})
      if self.end is not None:
        built.special['end'] = built.id_of(self.end, 'tokenizer.end')
      return built


def _stand_ins() -> dict[str, int]:
  """The byte of each character of a byte-level vocabulary: printable ones of Latin-1
  stand for themselves, those from U+0100 on for the others."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = [byte for byte in range(256) if byte not in plain]
  return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}


def _texts(config: Bpe.Config, documents: Iterable[Document]) -> Iterator[str]:
  """Raises DataError at the end if there was none."""
  seen = False
  for document in documents:
    if document.text:
      seen = True
      yield document.text.decode()
  if not seen:
    raise DataError(
      f'tokenizer={config}: no document has text to train on; if they are ids, name '
      'their tokenizer'
    )


def _kinds(decoder: Any) -> set[str]:
  """What a decoder is made of."""
  if not isinstance(decoder, dict):
    return set()
  inner = [_kinds(one) for one in decoder.get('decoders', ())]
  return {decoder.get('type', ''), *itertools.chain(*inner)}


def _roles(folder: Path, built: HuggingFace, end_needed: bool) -> dict[str, int]:
  """Ids of special tokens by role, from the files beside a tokenizer.json.

  Raises DataError on an end that is no token, if it is needed.
  """
  found: dict[str, int] = {}
  for name in _BESIDE:
    path = folder / name
    beside = _read(path) if path.exists() else {}
    for role, short in _ROLES.items():
      token = beside.get(f'{short}_token', beside.get(f'{short}_token_id'))
      if isinstance(token, list) and token:
        token = token[0]
      if isinstance(token, dict):
        token = token.get('content')
      if isinstance(token, str):
        token = built.vocabulary.get(token, token)
      if role in found or token is None:
        continue
      if type(token) is int and 0 <= token < built.vocab_size:
        found[role] = token
      elif role == 'end' and end_needed:
        raise DataError(
          f'{str(path)!r}: the {short} token {token!r} is not in the tokenizer.json '
          'beside it; repair them, or set tokenizer.end'
        )
  return found


def _read(path: Path) -> dict[str, Any]:
  text = splits.read('tokenizer.file', str(path))
  try:
    found = json.loads(text.decode())
  except (ValueError, RecursionError) as error:
    raise splits.unreadable(
      'tokenizer.file', str(path), f'not JSON ({error})'
    ) from None
  if not isinstance(found, dict):
    raise splits.unreadable('tokenizer.file', str(path), 'not a JSON object')
  return found
