"""What drafting is worth, found by really drafting: acceptance on held-out prompts by
draft length, parity with plain decoding, and the figure that a replay predicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from mtpjax import losses, mesh
from mtpjax.data import pack
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.models import cache
from mtpjax.models.attention import Rows
from mtpjax.sampling import trees
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder, pad
from mtpjax.sampling.jobs import Generation
from mtpjax.sampling.stats import Stats

RANKS = 8  # candidates for a token that are looked at
BUDGET = 16  # drafts of the tree that is proposed
# A tie this close may fall either way in a batch of another shape, by dtype.
MARGIN = {'float32': 1e-5, 'bfloat16': 2.0**-6, 'float64': 1e-12}


@dataclasses.dataclass
class Config:
  """Greedy decoding at the end of training and in evaluation."""

  prompts: int = 16  # held-out prompts, each the start of a document; 0 is none
  prompt_tokens: int = 64  # of each, at most
  tokens: int = 64  # new tokens of each
  text: str | None = None  # completed first, and shown; None: a held-out prompt is

  def finalize(self, field: str = 'decode') -> None:
    for name in ('prompts', 'prompt_tokens', 'tokens'):
      value, least = getattr(self, name), int(name != 'prompts')
      if not least <= value < 2**20:
        raise ConfigError(
          f'{field}.{name}', value, 'is out of range', f'use {least} … 2²⁰ - 1'
        )
    if self.text == '':
      raise ConfigError(f'{field}.text', '', 'is empty', 'use None for a held-out one')


def measure(
  graphdef: Any, params: Any, config: Config, rows: pack.Rows, tokenizer: Tokenizer
) -> dict[str, Any] | None:
  """Decodes the prompts plainly and with 1 … K drafts; None where nothing drafts or
  there is no prompt.

  Returns:
    acceptance_rate, tau, tokens_per_pass, acceptance_by_position,
      conditional_acceptance: with K drafts, over all prompts.
    by_draft_length: the rate, τ and tokens a pass with 1 … K drafts.
    replay_tau: what the trunk's own greedy text and the drafter's teacher-forced
      predictions give for τ.
    acceptance_by_rank: [K][RANKS], how often the trunk's token is the drafter's
      candidate of that rank, the path before it right; largest first.
    best_tree: of BUDGET drafts, the one with the most accepted to expect, as `--tree`
      takes it, and τ if depths were independent.
    parity: whether each text is the plain one.
    divergences: where one is not: its row, index, and the margin there between the
      plain decode's two best logits, as a share of the largest.
    rounding_explains: whether every margin is one that rounding can turn.
    plain_passes, draft_passes: of the shown completion.
    prompt, completion, draft_completion: of the same, as text.
    prompts, prompt_tokens, new_tokens: how much was decoded.
  """
  found = prompts(config, rows, tokenizer)
  model = nnx.merge(graphdef, params)
  part = model.objectives.get('drafter')
  if found is None or not isinstance(part, base.Drafter):
    return None
  ids, lengths = found
  longest = int(lengths.max()) + config.tokens
  decoder = Decoder(graphdef, params, longest=longest)
  stop = () if tokenizer.end is None else (tokenizer.end,)
  settings = Settings(budget=config.tokens, stop=stop)
  # Past the end too: it says which drafts of the last round are right.
  plain = Decoder(graphdef, params, draft=0, longest=longest).generate(
    ids, lengths, dataclasses.replace(settings, stop=())
  )
  texts, new = _texts(ids, lengths, plain), _ends(plain, stop)
  plain = dataclasses.replace(plain, lengths=new)
  K = decoder.draft
  runs = [
    decoder.generate(ids, lengths, dataclasses.replace(settings, draft=k + 1))
    for k in range(K)
  ]
  last, stats = runs[-1], runs[-1].stats
  with jax.set_mesh(mesh.whole_in_time()):
    margins, ranks = _teacher(graphdef, mesh.moved(params), texts, K)
  by_rank = _by_rank(ranks, lengths, new)
  best = trees.Tree.best(by_rank, BUDGET) if by_rank and by_rank[0][0] else None
  divergences = _divergences(plain, last, lengths, margins)
  return {
    **{k: v for k, v in stats.to_json().items() if k not in ('rounds', 'passes')},
    'by_draft_length': [
      {name: own.stats.to_json()[name] for name in _BY_LENGTH} for own in runs
    ],
    'replay_tau': replay(ranks == 0, lengths, new, config.tokens).tau,
    'acceptance_by_rank': by_rank,
    'best_tree': best and {'tree': str(best), 'tau': 1 + best.accepted(by_rank)},
    'parity': not divergences,
    'divergences': divergences,
    'rounding_explains': all(
      d['margin'] <= MARGIN[model.trunk.config.dtype] for d in divergences
    ),
    'plain_passes': int(new[0]),
    'draft_passes': last.rows[0].passes,
    'prompt': tokenizer.decode(ids[0, : lengths[0]]),
    'completion': tokenizer.decode(plain.tokens[0, : new[0]]),
    'draft_completion': tokenizer.decode(last.tokens[0, : last.lengths[0]]),
    'prompts': len(lengths),
    'prompt_tokens': int(lengths.sum()),
    'new_tokens': int(new.sum()),
  }


_BY_LENGTH = ('acceptance_rate', 'tau', 'tokens_per_pass')


def prompts(
  config: Config, rows: pack.Rows, tokenizer: Tokenizer, longest: int | None = None
) -> tuple[Int[np.ndarray, 'B P'], Int[np.ndarray, ' B']] | None:
  """Tokens and lengths: the given text, then the starts of held-out rows, spread evenly
  over them. None if there are none.

  Args:
    longest: positions that the trunk has learned; None: any number.

  Raises:
    ConfigError: a prompt and what follows it do not fit there.
  """
  ids = [] if config.text is None else [tokenizer.encode(config.text, 'decode.text')]
  count = min(config.prompts, len(rows))
  for index in np.linspace(0, len(rows) - 1, count).astype(int) if count else ():
    row = rows.row(int(index))
    # A row's first piece may be the middle of a long document: text all the same.
    first = np.count_nonzero(row['segments'] == row['segments'][0])
    # Where something is to be answered, the question is the prompt.
    question = int(np.argmax(row['mask'][:first]))
    if not row['mask'][question]:
      continue  # a question whose answer is in another row
    ids.append(row['tokens'][: question or min(first, config.prompt_tokens)])
  needed = max(map(len, ids), default=0) + config.tokens
  if ids and longest is not None and needed > longest:
    raise ConfigError(
      'trunk.learned_positions',
      longest,
      f'ends before the {needed} positions of the longest prompt and decode.tokens',
      f'use at least {needed}, or lower decode.tokens={config.tokens}',
    )
  return pad(ids) if ids else None


def replay(
  right_KBT: np.ndarray, prompts_B: np.ndarray, new_B: np.ndarray, budget: int
) -> Stats:
  """What greedy drafting counts on a text, from its right drafts alone.

  Let A_i be the leading run of right drafts at row i, 0 … K. A round at row i delivers
  A_i + 1 tokens and the next is at row i + A_i + 1; near the budget's end drafts are as
  few as the sampler's.

  Args:
    right_KBT: whether draft k of row i, after true tokens, is the text's.
    prompts_B, new_B: tokens of the prompt, and after it up to where the text ends.
    budget: tokens that may follow the prompt.
  """
  K = len(right_KBT)
  reach = np.arange(1, K + 1)
  total = Stats(0, *np.zeros((4, K), int), nodes=0, delivered=0, prefills=0)
  for b, (prompt, new) in enumerate(zip(prompts_B, new_B, strict=True)):
    given = 1  # by the prefill
    row = int(prompt) - 1  # the last row before it, whose features draft
    rounds, tables = 0, np.zeros((3, K), int)
    while given < new:
      count = min(K, budget - given - 1)
      run = int(np.cumprod(right_KBT[:count, b, row]).sum())
      rounds += 1
      tables += [reach <= run, reach <= count, reach <= min(run + 1, count)]
      row, given = row + run + 1, given + run + 1
    accepted, proposed, reached = tables
    total += Stats(
      rounds,
      accepted,
      accepted,
      proposed,
      reached,
      int(proposed.sum()),
      int(new),
      int(new > 0),
    )
  return total


def table(figures: dict[str, Any] | None) -> str:
  """The same for people."""
  if figures is None:
    return (
      'drafting is not measured: it takes a drafter and a prompt (held-out data or '
      'decode.text)'
    )

  def number(value):
    return '-' if value is None else f'{value:.3f}'

  lines = [
    f'drafting, greedy, {figures["prompts"]} prompts, '
    f'{figures["new_tokens"]} new tokens:',
    'drafts      τ   rate  tokens/pass',
  ]
  for k, own in enumerate(figures['by_draft_length'], 1):
    values = own['tau'], own['acceptance_rate'], own['tokens_per_pass']
    lines.append(f'{k:6} {" ".join(number(v).rjust(6) for v in values)}')
  by_position = ' '.join(map(number, figures['acceptance_by_position']))
  given = ' '.join(map(number, figures['conditional_acceptance']))
  same = 'all texts equal plain decoding'
  if figures['divergences']:
    margin = max(d['margin'] for d in figures['divergences'])
    explained = 'as' if figures['rounding_explains'] else 'which is NOT what'
    same = (
      f'{len(figures["divergences"])} texts leave plain decoding where its two best '
      f'logits are {margin:.1e} of the largest apart, {explained} rounding explains'
    )
  return '\n'.join(
    [
      *lines,
      f'by position {by_position}, given those before {given}',
      *_tree(figures['best_tree']),
      f"replay of the trunk's own text: τ {number(figures['replay_tau'])}; {same}",
      f'{figures["prompt"]!r} goes on, in {figures["plain_passes"]} plain passes:',
      f'  {figures["completion"]!r}',
      f'in {figures["draft_passes"]} passes with drafts:',
      f'  {figures["draft_completion"]!r}',
    ]
  )


def _tree(best: dict[str, Any] | None) -> list[str]:
  if best is None:
    return []
  return [f'best tree of {BUDGET} drafts: τ {best["tau"]:.3f}, --tree={best["tree"]}']


def _texts(ids, lengths, out: Generation) -> np.ndarray:
  """Prompts with what followed, [B, T]; T divides over no axis but the batch's."""
  T = int((lengths + out.lengths).max())
  texts = np.zeros((len(ids), T), np.int32)
  for b, (n, new) in enumerate(zip(lengths, out.lengths, strict=True)):
    texts[b, :n] = ids[b, :n]
    texts[b, n : n + new] = out.tokens[b, :new]
  return texts


def _ends(out: Generation, stop: tuple[int, ...]) -> Int[np.ndarray, ' B']:
  """New tokens of each row up to its first stop."""
  stops = np.isin(out.tokens, stop)
  stops &= np.arange(stops.shape[1])[None] < out.lengths[:, None]
  return np.where(stops.any(1), stops.argmax(1) + 1, out.lengths)


def _teacher(graphdef, params, texts: np.ndarray, K: int):
  """Of the whole texts at once: the margin of the best token over the second as a share
  of the largest logit [B, T], and the rank of the right draft among the candidates, up
  to RANKS [K, B, T]."""
  B, T = texts.shape
  share = mesh.axis_size(*mesh.BATCH)
  full = -(-B // share) * share
  padded = np.pad(texts, ((0, full - B), (0, 0)))

  @jax.jit
  def run(params, tokens):
    model = nnx.merge(graphdef, params)
    ones = jnp.ones_like(tokens)
    at = jnp.broadcast_to(jnp.arange(T)[None], tokens.shape, out_sharding=mesh.ids_BT)
    batch = base.Batch(tokens, ones > 0, Rows(at, ones))
    out = model.trunk(tokens, batch.rows, model.needs)
    drafter = model.objectives['drafter']
    predicted = drafter.predict(model.trunk, out, batch, jnp.int32(0), None)
    head = predicted.head or model.trunk.head()
    head = head[:K] if isinstance(head, tuple) else head

    def at_position(hidden):  # one at a time: logits of all would fill the memory
      hidden_BD, hidden_KBD = hidden
      logits = cache.whole(losses.head_logits(hidden_BD, model.trunk.head()))
      two, _ = jax.lax.top_k(logits, 2)
      size = jnp.max(jnp.abs(jnp.where(logits > -1e29, logits, 0)), -1)
      own = cache.whole(jnp.moveaxis(losses.head_logits(hidden_KBD, head), 1, 0))
      _, drafts = jax.lax.top_k(own, min(RANKS, own.shape[-1]))
      return (two[:, 0] - two[:, 1]) / size, drafts

    first = jnp.moveaxis(cache.whole(model.trunk.final_norm(out.hidden)), 1, 0)
    hidden = jax.reshard(predicted.hidden[:K], jax.P(None, mesh.BATCH, None, None))
    found = jax.lax.map(at_position, (first, jnp.moveaxis(hidden, 2, 0)))
    # Whole, for every process to read.
    return jax.tree.map(lambda x: jax.reshard(x, jax.P(*[None] * x.ndim)), found)

  ids = jax.device_put(padded, mesh.ids_BT)
  margin, drafts = (np.asarray(x) for x in run(params, ids))
  ranks = np.full((K, B, T), RANKS)
  for k in range(K):
    # Draft k, from 0, of row i is token i + k + 2.
    n = max(0, T - k - 2)
    hit = drafts[:n, :B, k] == texts[:, T - n :].T[..., None]
    ranks[k, :, :n] = np.where(hit.any(-1), hit.argmax(-1), RANKS).T
  return margin.T[:B], ranks


def _by_rank(ranks_KBT: np.ndarray, prompts_B, new_B) -> list[list[float]] | None:
  """How often each rank is right, of the drafts of tokens that are there; None where a
  depth has none. Ranks are sorted: few rows may turn two that are rare."""
  found = []
  for k, ranks in enumerate(ranks_KBT):
    rows = [
      ranks[b, n - 1 : max(0, n + new - k - 2)]
      for b, (n, new) in enumerate(zip(prompts_B, new_B, strict=True))
    ]
    drafts = np.concatenate([row for row in rows if len(row)] or [np.zeros(0, int)])
    if not len(drafts):
      return None
    counts = np.bincount(drafts, minlength=RANKS + 1)[:RANKS]
    found.append(np.sort(counts / len(drafts))[::-1].tolist())
  return found


def divergences(
  graphdef: Any, params: Any, prompts, lengths, plain: Generation, drafted: Generation
) -> list[dict[str, Any]]:
  """Where greedy texts leave the plain ones, as `measure` says it; the margins are
  computed only if any does."""
  nowhere = np.full((len(lengths), prompts.shape[1] + plain.tokens.shape[1]), np.nan)
  if not _divergences(plain, drafted, lengths, nowhere):
    return []
  with jax.set_mesh(mesh.whole_in_time()):
    texts = _texts(prompts, lengths, plain)
    margins, _ = _teacher(graphdef, mesh.moved(params), texts, 1)
  return _divergences(plain, drafted, lengths, margins)


def _divergences(
  plain: Generation, drafted: Generation, lengths, margins
) -> list[dict]:
  found = []
  for b, n in enumerate(lengths):
    size = min(plain.lengths[b], drafted.lengths[b])
    differ = np.flatnonzero(plain.tokens[b, :size] != drafted.tokens[b, :size])
    if len(differ) or plain.lengths[b] != drafted.lengths[b]:
      index = int(differ[0]) if len(differ) else int(size)
      margin = float(margins[b, n + index - 1])
      found.append({'row': b, 'index': index, 'margin': margin})
  return found
