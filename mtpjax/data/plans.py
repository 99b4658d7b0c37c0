"""From a source to rows: which tokenizer, and a plan of each domain."""

from collections.abc import Iterable, Mapping

import numpy as np

from mtpjax.data import pack
from mtpjax.data.mixture import Mixture, RowSource
from mtpjax.data.sources import Counts, DataError, Document, Source, Split
from mtpjax.data.tokenizer import Bytes, Tokenizer, TokenizerConfig, encode_document

AnySource = Source | RowSource | Mixture


def texts(
  source: AnySource, split: Split, counts: Counts
) -> dict[str, Iterable[Document]]:
  """The documents of each domain that has any."""
  return {
    name: part.documents(split, counts)
    for name, part in _parts(source).items()
    if not isinstance(part, RowSource)
  }


def tokenizer(
  source: AnySource,
  config: TokenizerConfig | None,
  documents: list[Document],
  heldout: list[Document],
) -> Tokenizer:
  """The sources' own, or else the config's, built from the documents.

  Raises:
    DataError: two of them are not the same.
  """
  own = _own_tokenizers(source)
  if not own:
    return (config or Bytes.Config()).build(documents, heldout)
  first, found = next(iter(own.items()))
  for name, other in own.items():
    if other.fingerprint != found.fingerprint:
      raise DataError(
        f'{name} has another tokenizer than {first}: prepare both with the same one'
      )
  if config is not None:
    try:
      same = config.build(documents, heldout).fingerprint == found.fingerprint
    except DataError:  # it needs documents that are not there
      same = False
    if not same:
      raise DataError(
        f'data.tokenizer={config}: {first} is in ids of another one already; set '
        'data.tokenizer=None to use that, or prepare the documents again'
      )
  return found


def check_tokenizer(source: AnySource, tokenizer: Tokenizer) -> None:
  """Raises DataError if a source has ids of another one."""
  for name, own in _own_tokenizers(source).items():
    if own.fingerprint != tokenizer.fingerprint:
      raise DataError(
        f'{name}: its ids are of another tokenizer than the one given; prepare the '
        'documents with that one, or give them as text'
      )


def plan(
  source: AnySource,
  split: Split,
  texts: Mapping[str, Iterable[Document]],
  tokenizer: Tokenizer,
  length: int,
  together: bool,
  seed: int,
  counts: Counts,
) -> pack.Rows:
  """One split of all domains: `pack.Join` for a mixture."""
  found = {}
  for name, part in _parts(source).items():
    if isinstance(part, RowSource):
      found[name] = part.rows(split, length, seed, together, counts)
    else:
      corpus = _tokenised(texts[name], tokenizer)
      counts.long += int((np.diff(corpus.offsets) > length).sum())
      found[name] = pack.pack(corpus, length, seed, together)
  return pack.Join(found) if isinstance(source, Mixture) else found['']


def check_targets(source: AnySource, rows: pack.Rows) -> None:
  """Raises DataError if a domain has nothing to predict."""
  plans = rows.parts if isinstance(rows, pack.Join) else {'': rows}
  for name, part in _parts(source).items():
    if not _has_target(plans[name]):
      where = f'data.source.parts[{name}]' if name else 'data.source'
      raise DataError(
        f'{where}={part}: no training document has two tokens of which the second may '
        'be a target, so there is nothing to predict; give longer documents, or masks '
        'that let more be learnt'
      )


def num_tokens(rows: pack.Rows) -> int | None:
  """None where nobody counted them."""
  if isinstance(rows, pack.Plan):
    return int(rows.tokens.size)
  if not isinstance(rows, pack.Join):
    return None
  counted = [num_tokens(part) for part in rows.parts.values()]
  return None if None in counted else sum(n or 0 for n in counted)


def _parts(source: AnySource) -> dict[str, Source | RowSource]:
  return source.parts if isinstance(source, Mixture) else {'': source}


def _own_tokenizers(source: AnySource) -> dict[str, Tokenizer]:
  """Those that sources bring, by the field of the source."""
  found = {}
  for name, part in _parts(source).items():
    own = part.tokenizer() if isinstance(part, RowSource) else None
    if own is not None:
      found[f'data.source.parts[{name}]' if name else 'data.source'] = own
  return found


def _tokenised(documents: Iterable[Document], tokenizer: Tokenizer) -> pack.Corpus:
  masks = []

  def ids():
    for document in documents:
      own, mask = encode_document(tokenizer, document)
      masks.append(mask)
      yield own

  return pack.concatenate(ids(), tokenizer.vocab_size, masks)


def _has_target(rows: pack.Rows) -> bool:
  if not isinstance(rows, pack.Plan):
    return len(rows) > 0  # made up from their index; looking at all could take for ever
  if not len(rows) or rows.piece_lengths.max() < 2:
    return False
  if rows.mask is None:
    return True
  for start in range(0, len(rows), 256):
    batch = rows.rows(np.arange(start, min(start + 256, len(rows))))
    if (batch['mask'] & (batch['positions'] > 0)).any():
      return True
  return False
