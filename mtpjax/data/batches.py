"""Batches: what the training step and the evaluation read.

Rows are shuffled anew each epoch and dealt to a fixed number of virtual shards, each a
grain iterator; a process reads some of them. What is in a batch therefore depends on
neither the number of processes nor on which of them was restarted.

B rows of this process's part of a batch, T slots of a row.
"""

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Shaped

from mtpjax.data import mixture, pack, plans, tasks
from mtpjax.data.mixture import Mixture
from mtpjax.data.sources import Counts, DataError, Document, Split, Stdlib
from mtpjax.data.tokenizer import Tokenizer, TokenizerConfig

Batch = dict[str, Shaped[np.ndarray, 'B T']]


@dataclasses.dataclass
class Config:
  """Where batches come from and their shape.

  Attributes:
    source: Stdlib(...), Text(...) or another, or a Mixture(...) of them.
    tokenizer: Bytes.Config() or another; None is the source's own, if it brings one,
      else Bytes.
    length: slots of a row, T.
    pack: whether a row holds several documents; False is one, or a piece of one.
    batch: rows of a global batch, over all processes.
    shards: virtual data shards: as many processes as divide it can read the data.
  """

  source: plans.AnySource = dataclasses.field(default_factory=Stdlib)
  tokenizer: TokenizerConfig | None = None
  length: int = 256
  pack: bool = True
  batch: int = 16
  shards: int = 8

  def validate(self, process_count: int = 1) -> None:
    """Raises DataError, naming the field and a value that works."""
    if self.length < 2:
      raise DataError(
        f'data.length={self.length}: a target needs a row of at least 2 slots'
      )
    _check_shares(self.batch, self.shards, process_count)
    if isinstance(self.source, Mixture):
      self.source.validate()


@dataclasses.dataclass
class Data:
  """Everything opened once.

  Attributes:
    tokenizer: the source's own, or built from both splits' documents.
    train: training rows, in packing order; `TrainBatches` shuffles them.
    heldout: held-out rows, none if nothing is held out.
    counts: what became of the documents, by split.
    weights: of the domains in the training batches; None without a mixture.
  """

  tokenizer: Tokenizer
  train: pack.Rows
  heldout: pack.Rows
  counts: dict[str, Counts]
  weights: dict[str, float] | None = None

  def __str__(self) -> str:
    said = []
    for split, rows in (('train', self.train), ('held out', self.heldout)):
      counts = self.counts[split.replace(' ', '')]
      left_out = [
        f'{number} {name}'
        for name, number in (('empty', counts.empty), ('bad', counts.bad))
        if number
      ]
      more = f' ({", ".join(left_out)} left out)' if left_out else ''
      tokens = plans.num_tokens(rows)
      amount = f'{len(rows):,} rows' if len(rows) < tasks.ENDLESS else 'endless rows'
      if tokens is not None:
        amount = f'{tokens:,} tokens of {counts.documents:,} documents'
      # An answer is learnt as far as it is in the row of its question.
      masked = isinstance(rows, pack.Plan) and rows.mask is not None
      cut = f', {counts.long:,} of them cut' if masked and counts.long else ''
      said.append(f'{split} {amount}{cut}{more}')
    if self.weights is not None:
      shares = mixture.whole_shares(self.weights).items()
      said.append(f'mixed {" : ".join(f"{share} {name}" for name, share in shares)}')
    return ', '.join(said)


def open_data(config: Config, seed: int) -> Data:
  """Reads, tokenises and packs both splits; the seed orders the training documents.

  Raises:
    DataError: bad fields or data; a training set without a single target.
  """
  config.validate()
  _check_seed(seed)
  counts = {'train': Counts(), 'heldout': Counts()}
  # A tokenizer may need all documents before the first of them is packed.
  train = _texts(config, 'train', counts['train'])
  heldout = _texts(config, 'heldout', counts['heldout'])
  tokenizer = plans.tokenizer(
    config.source,
    config.tokenizer,
    *([d for own in texts.values() for d in own] for texts in (train, heldout)),
  )
  layout = config.length, config.pack
  data = Data(
    tokenizer=tokenizer,
    train=plans.plan(
      config.source, 'train', train, tokenizer, *layout, seed, counts['train']
    ),
    # Held-out rows are the same for every seed, so that runs compare.
    heldout=plans.plan(
      config.source, 'heldout', heldout, tokenizer, *layout, 0, counts['heldout']
    ),
    counts=counts,
    weights=config.source.weights if isinstance(config.source, Mixture) else None,
  )
  plans.check_targets(config.source, data.train)
  return data


def open_rows(config: Config, tokenizer: Tokenizer, split: Split) -> pack.Rows:
  """One split, packed as `open_data` packs held-out rows, by a given tokenizer.

  Raises:
    DataError: bad fields or data, a character that the tokenizer does not know, or ids
      of another tokenizer.
  """
  config.validate()
  plans.check_tokenizer(config.source, tokenizer)
  counts = Counts()
  texts = plans.texts(config.source, split, counts)
  return plans.plan(
    config.source, split, texts, tokenizer, config.length, config.pack, 0, counts
  )


class TrainBatches(Iterator[Batch]):
  """Endless training batches of one process; `get_state` makes them resumable.

  The rows of epoch after epoch, each shuffled anew, form one endless sequence; global
  batch j is its elements j·batch to (j+1)·batch. So nothing is dropped at the end of an
  epoch: a batch may hold the end of one and the start of the next, and where there are
  fewer rows than `batch` it holds some of them several times. Within a batch rows stand
  shard by shard, shard s having every shards-th element from the s-th; a process reads
  consecutive shards, so its rows are consecutive in the global batch.

  With weights the endless sequence is drawn from those of the domains, each shuffled
  anew in every epoch of its own (`mixture.endless`).

  Args:
    plan: the training rows.
    weights: of each of its domains; None makes no difference between them.
    batch: rows of the global batch; a multiple of shards.
    shards: virtual shards; a multiple of process_count.
    seed: of the shuffle, in [0, 2**32).

  Raises:
    DataError: a field does not fit; the plan has no rows.
  """

  def __init__(
    self,
    plan: pack.Rows,
    *,
    batch: int,
    shards: int,
    seed: int,
    weights: dict[str, float] | None = None,
    process_index: int = 0,
    process_count: int = 1,
  ):
    _check_shares(batch, shards, process_count)
    _check_process(process_index, process_count)
    _check_seed(seed)
    if not len(plan):
      raise DataError('plan: no rows to train on; give a source with documents')
    self._plan = plan
    self._rows_per_shard = batch // shards
    shares = weights and sorted(mixture.whole_shares(weights).items())
    checks = plan.fingerprint(), seed, shards, shares
    self._fingerprint = zlib.crc32(str(checks).encode()) >> 1
    rows = mixture.endless(plan, weights, seed)
    # A row is a gather from memory: threads would cost more than they hide.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    own = shards // process_count
    self._shards = {
      str(shard): iter(rows[shard::shards].to_iter_dataset(options))
      for shard in range(process_index * own, (process_index + 1) * own)
    }

  def __next__(self) -> Batch:
    """tokens, segments, positions int32 and mask bool, [batch / process_count, T]."""
    indices = [
      next(iterator)
      for iterator in self._shards.values()
      for _ in range(self._rows_per_shard)
    ]
    return self._plan.rows(np.array(indices))

  def get_state(self) -> dict[str, dict[str, Any]]:
    """This process's shards by number, as JSON; merge all processes' to save them."""
    return {
      shard: {'iterator': iterator.get_state(), 'data': self._fingerprint}
      for shard, iterator in self._shards.items()
    }

  def set_state(self, state: dict[str, dict[str, Any]]) -> None:
    """Goes on where `get_state` was called, with any number of processes or batch.

    Args:
      state: of all shards, or of this process's at least.

    Raises:
      DataError: a shard is missing, shards are at different rows, or the state is of
        other data; nothing has changed then.
    """
    if missing := sorted(set(self._shards) - set(state), key=int):
      raise DataError(
        f'state: no shard {", ".join(missing)} among {sorted(state)}; merge the states '
        'of all processes, and keep the number of shards'
      )
    own = {shard: state[shard] for shard in self._shards}
    if any(part['data'] != self._fingerprint for part in own.values()):
      raise DataError(
        'state: it was saved with other documents, tokenizer, length, weights, shards '
        'or seed, so its rows are not these; restore them, or start without the data '
        'state'
      )
    if len({str(part['iterator']) for part in own.values()}) > 1:
      raise DataError(
        'state: its shards are at different rows; save all processes at the same step'
      )
    for shard, iterator in self._shards.items():
      # A checkpoint may have made them NumPy integers, which are not JSON.
      iterator.set_state({k: int(v) for k, v in own[shard]['iterator'].items()})


def heldout_batches(
  plan: pack.Rows, batch: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
  """Every row once, in order: this process's part of each global batch.

  All processes yield equally many batches of the same shape [batch / process_count, T];
  the last ones are filled up with rows of padding (segments 0, mask false). A plan
  without rows yields none.

  Raises:
    DataError: batch is not a positive multiple of process_count.
  """
  _check_process(process_index, process_count)
  if batch < 1 or batch % process_count:
    raise DataError(
      f'batch={batch} over process_count={process_count}: must be a multiple of it, '
      f'such as {_multiple_near(batch, process_count)}'
    )
  own = batch // process_count
  starts = range(process_index * own, _round_up(len(plan), batch), batch)
  return (
    plan.rows(np.arange(min(s, len(plan)), min(s + own, len(plan))), size=own)
    for s in starts
  )


def _texts(config: Config, split: Split, counts: Counts) -> dict[str, list[Document]]:
  texts = plans.texts(config.source, split, counts)
  return {name: list(documents) for name, documents in texts.items()}


def _check_shares(batch: int, shards: int, process_count: int) -> None:
  if process_count < 1:
    raise DataError(f'process_count={process_count}: must be at least 1')
  if shards < 1 or shards % process_count:
    raise DataError(
      f'data.shards={shards} over process_count={process_count}: must be a '
      f'multiple of it, such as {_multiple_near(shards, process_count)}'
    )
  if batch < 1 or batch % shards:
    raise DataError(
      f'data.batch={batch} over data.shards={shards}: must be a multiple of it, '
      f'such as {_multiple_near(batch, shards)}'
    )


def _check_process(process_index: int, process_count: int) -> None:
  if not 0 <= process_index < process_count:
    raise DataError(
      f'process_index={process_index} of process_count={process_count}: must be in '
      '[0, process_count)'
    )


def _check_seed(seed: int) -> None:
  if not 0 <= seed < 2**32:
    raise DataError(f'seed={seed}: must be in [0, 2**32)')


def _round_up(number: int, divisor: int) -> int:
  return -(-number // divisor) * divisor


def _multiple_near(number: int, divisor: int) -> int:
  return max(divisor, _round_up(number, divisor))
