"""Tokens in, tokens out: a model laid out for decoding, and its compilations.

Shapes are bucketed: rows to powers of two, lengths to powers of two, so that one
compilation for each (rows, length, longest draft) serves every batch of that size.
Stop strings take a table of a few sizes. Nothing else is compiled for: temperatures,
filters, seeds, prompts, budgets, stops and draft lengths are data, each row's own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Int, Key

from mtpjax import mesh
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.models.cache import KINDS
from mtpjax.sampling import branching, engine, filters, queue, stops, trees, verify
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.jobs import Generation, Job, Padding
from mtpjax.sampling.run import Run

RULES = tuple({**verify.RULES, **branching.RULES})
LOSSY = ('typical',)  # rules whose text is not distributed as the model's


class Decoder:
  """A model whose weights are laid out for decoding, once.

  It runs on the mesh that is set when it is made. A decode has no time to split: there
  the devices of 'context' have rows of their own.

  Args:
    graphdef: from `model.init`.
    params: from there or from a checkpoint.
    draft: the longest draft to compile for; None is what the drafter was trained for, 0
      decodes plainly.
    rule: one of `RULES`; greedy rows do not depend on it. All are exact but the
      `LOSSY`.
    tree: a shape of drafts that branch, see `trees.parse`; None is a chain.
    draft_cost: what one more draft costs to make and verify, as a share of a plain
      pass; bench.json has it. Each row of a chain then drafts as many as its own
      acceptance pays for, up to `draft`; None: always as many as it may.
    longest: tokens of a row, prompt and new ones, at most; never more than a trunk
      with learned positions has.
    chunk: tokens of a prompt read at once.
    tokenizer: what stop strings are looked for in; a `Sampler` gives its own.
    cache: what keys and values are kept in, 'bfloat16' or 'int8'; None is the dtype of
      compute. Text may differ a little, with drafts and without in the same way.

  Raises:
    ConfigError: what cannot be done, before anything compiles.
  """

  def __init__(
    self,
    graphdef: Any,
    params: Any,
    *,
    draft: int | None = None,
    rule: str = 'rejection',
    tree: trees.Tree | trees.Dynamic | str | None = None,
    draft_cost: float | None = None,
    longest: int = 4096,
    chunk: int = 64,
    cache: str | None = None,
    tokenizer: Tokenizer | None = None,
  ):
    _check_rule(rule)
    if cache not in (None, *KINDS):
      fix = f'use {" or ".join(KINDS)}, or None for the dtype of compute'
      raise ConfigError('cache', cache, 'is nothing to keep keys and values in', fix)
    for name, value in (('longest', longest), ('chunk', chunk), ('draft', draft)):
      if value is not None and (name != 'draft' or type(value) is not int):
        filters.check_whole(name, value)
    for name, value in (('longest', longest), ('chunk', chunk)):
      filters.check_positive(name, value)
    if draft_cost is not None and not 0 <= draft_cost < math.inf:
      fix = 'use a share of a pass, 0.1 or so, or None'
      raise ConfigError('draft_cost', draft_cost, 'is no cost', fix)
    self.draft_cost = draft_cost
    model = nnx.merge(graphdef, params)
    assert model.trunk.config.vocab is not None
    self.vocab: int = model.trunk.config.vocab
    self.draft = _draft(model, draft)
    self.tree = self._shape(rule, tree, _most(model, draft))
    if draft_cost is not None and self.tree:
      fix = 'leave it out, or the tree, or choose another rule'
      problem = 'means nothing where drafts branch, or are judged as a tree'
      raise ConfigError('draft_cost', draft_cost, problem, fix)
    self.draft = self.tree.depth if self.tree else self.draft
    learned = model.trunk.config.learned_positions
    self.longest = longest if learned is None else min(longest, learned)
    self.rule, self.chunk, self.cache = rule, chunk, cache
    self.tokenizer = tokenizer
    self._automata: dict[str, stops.Automata] = {}  # by the tokenizer's fingerprint
    self._graphdef = graphdef
    self._mesh = mesh.whole_in_time()
    self.take(params)
    self._compiled: dict[tuple, Any] = {}
    # (what, rows, slots, draft), and rows of the table of stop strings if there are any
    self.compilations: dict[tuple, float] = {}  # in seconds

  def _shape(
    self, rule: str, tree: Any, longest: int
  ) -> trees.Tree | trees.Dynamic | None:
    """How drafts branch, as deep as that at most. A rule that is written for trees
    judges a chain as one."""
    if tree is None:
      alone = rule in verify.RULES or not self.draft
      return None if alone else trees.Tree.chain(self.draft)
    if rule not in branching.RULES:
      fix = f'use {" or ".join(branching.RULES)}, or no tree'
      raise ConfigError('rule', rule, 'judges chains only', fix)
    if not self.draft:
      fix = 'leave the tree out'
      raise ConfigError('tree', tree, 'needs a drafter that drafts', fix)
    return trees.parse(tree, self.draft, self.vocab, longest)

  def take(self, params: Any) -> None:
    """Other parameters of the same model: what is compiled stays."""
    with jax.set_mesh(self._mesh):
      self._weights = engine.lay_out(self._graphdef, mesh.moved(params))

  def over(
    self,
    draft: int | None,
    rule: str,
    drafter: Callable[[base.Drafter], base.Drafter] | None = None,
  ) -> Decoder:
    """Another longest draft, rule or drafter over the very same weights; drafts do not
    branch, and cost nothing.

    Args:
      drafter: makes it from the one that there is, whose parameters are laid out.
    """
    _check_rule(rule)
    other = copy.copy(self)
    model = nnx.merge(self._graphdef, self._weights)
    other.draft, other.rule = _draft(model, draft), rule
    other.tree, other.draft_cost = other._shape(rule, None, other.draft), None
    if drafter is not None:
      with jax.set_mesh(self._mesh):
        model.objectives['drafter'] = drafter(model.objectives['drafter'])
      other._graphdef, state = nnx.split(model)
      other._weights = nnx.to_pure_dict(state)
    other._compiled, other.compilations = {}, {}
    return other

  def generate(
    self,
    prompts: Int[Any, 'B P'],
    lengths: Int[Any, ' B'],
    settings: Settings | Sequence[Settings],
    key: Key[Array, ''] | None = None,
    padding: Padding = 'right',
    samples: int = 1,
  ) -> Generation:
    """All of it in one call of the device; see `generate`."""
    job = self._job(prompts, lengths, settings, key, padding, samples)
    state = self._call('decode', job, job.prompts, job.lengths, job.sampling)
    return job.generation(self._fetch(state))

  def throughput(
    self,
    prompts: Int[Any, 'B P'],
    lengths: Int[Any, ' B'],
    settings: Settings | Sequence[Settings],
    key: Key[Array, ''] | None = None,
    padding: Padding = 'right',
    samples: int = 1,
    rows: int = 32,
  ) -> Generation:
    """The same texts, of any number of prompts, `rows` of them side by side at most:
    where one has ended the next prompt is read, still in one call of the device. A
    device has a prompt's samples, so at least as many rows.

    The largest budgets come first, so that few rows wait for the last text.
    """
    job = self._job(prompts, lengths, settings, key, padding, samples, rows)
    given = queue.Queue(job.prompts, job.lengths, job.sampling, job.counts)
    state = self._call('throughput', job, given)
    return job.generation(self._fetch(state))

  def stream(
    self,
    prompts: Int[Any, 'B P'],
    lengths: Int[Any, ' B'],
    settings: Settings | Sequence[Settings],
    key: Key[Array, ''] | None = None,
    padding: Padding = 'right',
  ) -> Iterator[Generation]:
    """The same, handed out after the prefill and after every round; the last one is
    what `generate` returns."""
    run = self.start(prompts, lengths, settings, key, padding)
    while True:
      yield run.fetch()
      if run.done:
        return
      run.go_on(1)

  def start(
    self,
    prompts: Int[Any, 'B P'],
    lengths: Int[Any, ' B'],
    settings: Settings | Sequence[Settings],
    key: Key[Array, ''] | None = None,
    padding: Padding = 'right',
  ) -> Run:
    """The same under the caller's command: after the prefill, rounds as it asks."""
    job = self._job(prompts, lengths, settings, key, padding)
    return Run(lambda what, *args: self._call(what, job, *args), self._fetch, job)

  def check(
    self,
    prompts: Int[Any, 'B P'],
    lengths: Int[Any, ' B'],
    settings: Settings | Sequence[Settings],
  ) -> list[Settings]:
    """Each row's settings. Raises ConfigError on what cannot be honoured, naming it."""
    try:
      prompts, lengths = np.asarray(prompts), np.asarray(lengths)
    except ValueError:
      fix = 'use generate.pad, which gives tokens [B, P] and lengths [B]'
      raise ConfigError('prompts', 'lists', 'are ragged', fix) from None
    if prompts.ndim != 2 or lengths.shape != prompts.shape[:1] or not len(prompts):
      raise ConfigError(
        'prompts',
        f'{list(prompts.shape)} with lengths {list(lengths.shape)}',
        'are no batch',
        'give tokens [B, P] and lengths [B], B at least 1',
      )
    for name, table in (('prompts', prompts), ('lengths', lengths)):
      if table.dtype.kind not in 'iu':
        fix = 'use whole numbers'
        raise ConfigError(name, f'of {table.dtype}', 'are no tokens', fix)
    B, P = prompts.shape
    many = isinstance(settings, Sequence)
    each: list[Any] = list(settings) if many else [settings] * B
    if len(each) != B:
      raise ConfigError(
        'settings', len(each), f'are not one for each of {B} prompts', 'give as many'
      )
    for row, (length, own) in enumerate(zip(lengths, each, strict=True)):
      if not isinstance(own, Settings):
        fix = 'use filters.Settings(…)'
        raise ConfigError(f'settings[{row}]', own, 'are no Settings', fix)
      own.check(self.vocab)
      if own.stop_strings and self.tokenizer is None:
        raise ConfigError(
          f'settings[{row}].stop_strings',
          own.stop_strings,
          'needs the text of tokens, which is not known here',
          'use a Sampler, or make the Decoder with tokenizer=…',
        )
      if not 1 <= length <= P:
        problem = 'is empty' if length == 0 else f'does not fit in {P} tokens'
        fix = f'use 1 … {P}: a text starts from at least one token'
        raise ConfigError(f'prompts[{row}]', f'{length} tokens', problem, fix)
      if length + own.budget > self.longest:
        raise ConfigError(
          f'prompts[{row}]',
          f'{length} tokens and a budget of {own.budget}',
          f'does not fit longest={self.longest}',
          f'use a budget up to {self.longest - length}'
          if length < self.longest
          else 'shorten the prompt, or raise longest',
        )
      if own.draft is not None and own.draft > self.draft:
        raise ConfigError(
          f'settings[{row}].draft',
          own.draft,
          f'is more than the {self.draft} compiled for',
          f'use up to {self.draft}, or make the Decoder with draft={own.draft}',
        )
    if prompts.size and (prompts.min() < 0 or prompts.max() >= self.vocab):
      bad = prompts.min() if prompts.min() < 0 else prompts.max()
      raise ConfigError(
        'prompts', int(bad), f'is no token of {self.vocab}', 'use the right tokenizer'
      )
    return each

  def _job(
    self,
    prompts,
    lengths,
    settings,
    key,
    padding: Padding,
    samples: int = 1,
    rows: int | None = None,
  ) -> Job:
    """Everything checked, and put on the devices.

    Args:
      rows: texts side by side, at most; None: all of them.
    """
    if padding not in ('right', 'left'):
      fix = "use 'right' or 'left'"
      raise ConfigError('padding', padding, 'is no side', fix)
    for name, value in (('samples', samples), ('rows', rows)):
      if value is not None:
        filters.check_positive(name, value)
    each = self.check(prompts, lengths, settings)
    prompts, lengths = np.asarray(prompts), np.asarray(lengths)
    with jax.set_mesh(self._mesh):
      return Job.of(
        prompts,
        lengths,
        each,
        self.draft,
        key,
        padding=padding,
        samples=samples,
        rows=rows,
        strings=self._strings,
      )

  def _strings(self, settings: Sequence[Settings]) -> stops.Strings | None:
    """The stop strings, compiled; None where no row has any."""
    strings = [own.stop_strings for own in settings]
    if self.tokenizer is None or not any(strings):
      return None
    name = self.tokenizer.fingerprint
    if name not in self._automata:
      self._automata = {name: stops.Automata(self.tokenizer.token_bytes, self.vocab)}
    return self._automata[name].strings(strings)

  def _call(self, what: str, job: Job, *args) -> engine.State:
    many = () if what != 'throughput' else (len(job.lengths) * job.samples,)
    name = (what, *job.sizes, self.draft, *many)
    if job.sampling.strings is not None:
      name += (len(job.sampling.strings.table),)
    if (name, job.samples) not in self._compiled:
      began = time.monotonic()
      plan = engine.Plan(
        self.draft,
        slots=job.sizes[1],
        chunk=self.chunk,
        rule=self.rule,
        cache=self.cache,
        tree=self.tree,
        draft_cost=self.draft_cost,
        samples=job.samples,
      )
      if what == 'throughput':
        side = job.sizes[0] // len(job.counts)
        group = max(1, side // job.samples // 8)
        call = functools.partial(queue.run, batch=job.sizes[0], group=group)
      else:
        call = getattr(engine, what)
      run = functools.partial(call, self._graphdef, plan)
      donate = (1,) if what == 'rounds' else ()
      with jax.set_mesh(self._mesh):
        lowered = jax.jit(run, donate_argnums=donate).lower(self._weights, *args)
        self._compiled[name, job.samples] = lowered.compile()
      self.compilations[name] = time.monotonic() - began
    return self._compiled[name, job.samples](self._weights, *args)

  def _fetch(self, state: engine.State) -> engine.State:
    """On the host, without what it does not want to see; the same on every process."""
    light = dataclasses.replace(state, caches=None, drafter=None)
    if jax.process_count() > 1:
      with jax.set_mesh(self._mesh):
        return multihost_utils.process_allgather(light, tiled=True)
    return jax.device_get(light)


def generate(
  model: Decoder,
  prompts: Int[Any, 'B P'],
  lengths: Int[Any, ' B'],
  sampling: Settings | Sequence[Settings],
  key: Key[Array, ''] | None = None,
  padding: Padding = 'right',
  samples: int = 1,
) -> Generation:
  """Continues prompts; a row's text depends on its own prompt and settings alone.

  Args:
    prompts: token ids, padded on the side that `padding` says.
    lengths: of the prompts.
    sampling: one for all, or one for each.
    key: folded into every row's seed, so rows of equal seeds draw alike; None leaves
      the seeds as they are.
    samples: texts of each prompt, side by side in what is returned. They share its
      prefill; `Settings.sample` says with which seed each is drawn.

  Raises:
    ConfigError: a prompt or a setting that cannot be honoured.
  """
  return model.generate(prompts, lengths, sampling, key, padding, samples)


def pad(
  rows: Sequence[Any],
) -> tuple[Int[np.ndarray, 'B P'], Int[np.ndarray, ' B']]:
  """Prompts of any lengths as `generate` takes them: (tokens, lengths)."""
  lengths = np.array([len(row) for row in rows])
  padded = np.zeros((len(rows), lengths.max()), np.int32)
  for n, row in enumerate(rows):
    padded[n, : len(row)] = row
  return padded, lengths


def _check_rule(rule: str) -> None:
  if rule not in RULES:
    raise ConfigError('rule', rule, 'is no rule', f'use {" or ".join(RULES)}')


def _most(model: Any, wanted: int | None) -> int:
  """How deep a tree may be."""
  part = model.objectives.get('drafter')
  if wanted is not None or not isinstance(part, base.Drafter):
    return wanted or 0
  return part.max_draft


def _draft(model: Any, wanted: int | None) -> int:
  """The longest draft to compile for."""
  part = model.objectives.get('drafter')
  if not isinstance(part, base.Drafter):
    if wanted:
      fix = 'use draft=0 to decode plainly'
      raise ConfigError('draft', wanted, 'needs a drafter, and there is none', fix)
    return 0
  if wanted is None:
    return min(part.config.depth, part.max_draft)
  if not 0 <= wanted <= part.max_draft:
    raise ConfigError(
      'draft',
      wanted,
      'is longer than the drafter drafts' if wanted > 0 else 'is negative',
      f'use 0 … {part.max_draft}',
    )
  return wanted
