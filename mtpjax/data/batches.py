"""Batches: what the training step and the evaluation read.

Rows are shuffled anew each epoch and dealt to a fixed number of virtual shards. What is
in a batch therefore depends on neither the number of processes nor on which of them was
restarted; each reads those rows of it that its devices hold.

B rows of this process's part of a batch, T slots of a row.
"""

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

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
    shards: virtual data shards, which order the rows of a batch; they divide it.
  """

  source: plans.AnySource = dataclasses.field(default_factory=Stdlib)
  tokenizer: TokenizerConfig | None = None
  length: int = 256
  pack: bool = True
  batch: int = 16
  shards: int = 8

  def validate(self) -> None:
    """Raises DataError, naming the field and a value that works."""
    if self.length < 2:
      raise DataError(
        f'data.length={self.length}: a target needs a row of at least 2 slots'
      )
    _check_shares(self.batch, self.shards)
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

  def fingerprint(self) -> str:
    """The same wherever the same was read."""
    rows = self.train.fingerprint(), self.heldout.fingerprint()
    return f'{zlib.crc32(str((*rows, self.tokenizer.fingerprint)).encode()):08x}'

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
  """Endless training batches; `get_state` makes them resumable.

  The rows of epoch after epoch, each shuffled anew, form one endless sequence; global
  batch j is its elements j·batch to (j+1)·batch. So nothing is dropped at the end of an
  epoch: a batch may hold the end of one and the start of the next, and where there are
  fewer rows than `batch` it holds some of them several times. Within a batch rows stand
  shard by shard, shard s having every shards-th element from the s-th.

  With weights the endless sequence is drawn from those of the domains, each shuffled
  anew in every epoch of its own (`mixture.endless`).

  Args:
    plan: the training rows.
    weights: of each of its domains; None makes no difference between them.
    batch: rows of the global batch; a multiple of shards.
    shards: virtual shards.
    seed: of the shuffle, in [0, 2**32).
    own: the rows of a global batch that are wanted here, in this order; None: all.

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
    own: Int[np.ndarray, ' B'] | None = None,
  ):
    _check_shares(batch, shards)
    _check_seed(seed)
    if not len(plan):
      raise DataError('plan: no rows to train on; give a source with documents')
    self._plan = plan
    shares = weights and sorted(mixture.whole_shares(weights).items())
    checks = plan.fingerprint(), seed, shards, shares
    self._fingerprint = zlib.crc32(str(checks).encode()) >> 1
    self._sequence = mixture.endless(plan, weights, seed)
    self._own = np.arange(batch) if own is None else own
    self._shards, self._each = shards, batch // shards
    self._next = 0  # of every shard

  def __next__(self) -> Batch:
    """tokens, segments, positions int32 and mask bool, [B, T]."""
    shard, nth = np.divmod(self._own, self._each)
    # A row is a gather from memory: threads would cost more than they hide.
    places = (shard + self._shards * (self._next + nth)).tolist()
    self._next += self._each
    return self._plan.rows(np.array([self._sequence[place] for place in places]))

  def get_state(self) -> dict[str, dict[str, Any]]:
    """All shards by number, as JSON; the same on every process."""
    one = {'iterator': {'next_index': self._next}, 'data': self._fingerprint}
    return {str(shard): one for shard in range(self._shards)}

  def set_state(self, state: dict[str, dict[str, Any]]) -> None:
    """Goes on where `get_state` was called, with any number of processes or batch.

    Raises:
      DataError: a shard is missing, shards are at different rows, or the state is of
        other data; nothing has changed then.
    """
    shards = {str(shard) for shard in range(self._shards)}
    if missing := sorted(shards - set(state), key=int):
      raise DataError(
        f'state: no shard {", ".join(missing)} among {sorted(state)}; keep the number '
        'of shards'
      )
    if any(state[shard]['data'] != self._fingerprint for shard in shards):
      raise DataError(
        'state: it was saved with other documents, tokenizer, length, weights, shards '
        'or seed, so its rows are not these; restore them, or start without the data '
        'state'
      )
    # A checkpoint may have made them NumPy integers, which are not JSON.
    found = {int(state[shard]['iterator']['next_index']) for shard in shards}
    if len(found) > 1:
      raise DataError(
        'state: its shards are at different rows; save all of them at the same step'
      )
    (self._next,) = found


def heldout_batches(
  plan: pack.Rows, batch: int, own: Int[np.ndarray, ' B'] | None = None
) -> Iterator[Batch]:
  """Every row once, in order: this process's part of each global batch.

  All processes yield equally many batches, [B, T]; the last one is filled up with rows
  of padding (segments 0, mask false). A plan without rows yields none.

  Args:
    own: the rows of a global batch that are wanted here, ascending; None: all.

  Raises:
    DataError: batch is not positive.
  """
  if batch < 1:
    raise DataError(f'batch={batch}: must be at least 1')
  rows = np.arange(batch) if own is None else own
  wanted = (rows + start for start in range(0, len(plan), batch))
  return (plan.rows(each[each < len(plan)], size=len(each)) for each in wanted)


def _texts(config: Config, split: Split, counts: Counts) -> dict[str, list[Document]]:
  texts = plans.texts(config.source, split, counts)
  return {name: list(documents) for name, documents in texts.items()}


def _check_shares(batch: int, shards: int) -> None:
  if shards < 1:
    raise DataError(f'data.shards={shards}: must be at least 1')
  if batch < 1 or batch % shards:
    raise DataError(
      f'data.batch={batch} over data.shards={shards}: must be a multiple of it, '
      f'such as {max(shards, -(-batch // shards) * shards)}'
    )


def _check_seed(seed: int) -> None:
  if not 0 <= seed < 2**32:
    raise DataError(f'seed={seed}: must be in [0, 2**32)')
