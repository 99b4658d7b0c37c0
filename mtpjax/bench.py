"""Measures what a checkpoint's drafter is worth here: plain and speculative decoding in
one run, interleaved, and says which K pays, or that none does.

  python -m mtpjax.bench --checkpoint=runs/quickstart [--draft=1,2,3] [--batches=1,8]

Prompts are held-out ones, `--config.decode.prompts` of them, or the lines of
--prompts=FILE. Streaming gives the times to the first token (TTFT) and a token (TPOT);
--concurrency requests arrive together and are served --batches at a time, so some wait.
The loop without streaming gives tokens per second. --accept=0.8 has every draft be
right with that probability, whatever the drafter proposes, for the ceiling.
--temperature draws text, and then --rules are compared. Table, figure and JSON with all
raw records: bench.png and bench.json in the run's directory, or where --json says.
"""

import dataclasses
import io
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import nnx

from mtpjax import (
  acceptance,
  fields,
  figures,
  mesh,
  metrics,
  paths,
  processes,
  saved,
  terminal,
  two_sample,
  verdict,
)
from mtpjax import config as configs
from mtpjax import flags as command
from mtpjax.checkpoint import CheckpointError
from mtpjax.data import batches
from mtpjax.data.sources import DataError
from mtpjax.drafters import base
from mtpjax.sampling import timing
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import LOSSY, RULES, Decoder, pad
from mtpjax.sampling.sweep import GREEDY, Sweep, draws, greedy_texts, measured
from mtpjax.sampling.timing import Batch, Request, Rounds, Variant


def define_flags() -> None:
  """Once this is the command: names like --draft mean something else to others."""
  define = flags.DEFINE_list
  define('draft', None, 'drafts a round; default 1 … as trained')
  define('rules', ['rejection'], 'how drafts of drawn text are judged')
  define('batches', ['1'], 'prompts side by side')
  define('concurrency', None, 'requests that arrive together; default a batch')
  flags.DEFINE_float('temperature', 0.0, '0 takes the most likely token')
  flags.DEFINE_integer('tokens', 64, 'new tokens of each prompt, at most')
  flags.DEFINE_integer('repeats', 5, 'of everything; below 5 show nothing')
  flags.DEFINE_float('accept', None, 'simulate drafts that are right so often')
  flags.DEFINE_integer('samples', 512, 'draws for the test of distribution; 0: none')
  flags.DEFINE_string('prompts', None, 'a file, a prompt a line')
  saved.define_flags()
  processes.define_flags()
  for module in (saved, processes):
    flags.adopt_module_key_flags(module)


def sweep() -> Sweep:
  """What the flags say, checked before anything is read; K may be missing."""
  given = flags.FLAGS
  for rule in given.rules or ['']:
    if rule not in RULES:
      raise fields.ConfigError(
        '--rules', rule, 'is no rule', f'choose from {", ".join(RULES)}'
      )
  for name, value, least in (
    ('--tokens', given.tokens, 1),
    ('--repeats', given.repeats, 1),
    ('--samples', given.samples, 0),
  ):
    if value < least:
      raise fields.ConfigError(name, value, 'is too few', f'use at least {least}')
  accept, temperature = given.accept, given.temperature
  if accept is not None and not 0 <= accept <= 1:
    raise fields.ConfigError('--accept', accept, 'is no probability', 'use 0 … 1')
  if accept is not None and temperature:
    fix = 'leave --temperature out'
    raise fields.ConfigError('--accept', accept, 'simulates greedy drafts', fix)
  try:
    Settings(temperature=temperature).check(1)
  except fields.ConfigError as error:
    raise fields.ConfigError(
      '--temperature', temperature, error.problem, error.fix
    ) from None
  return Sweep(
    draft=_counts('--draft', given.draft) if given.draft is not None else [],
    rules=list(dict.fromkeys(given.rules)),
    batches=_counts('--batches', given.batches),
    concurrency=_counts('--concurrency', given.concurrency)
    if given.concurrency is not None
    else [],
    temperature=temperature,
    tokens=given.tokens,
    repeats=given.repeats,
    accept=accept,
  )


def _counts(flag: str, values: list[str]) -> list[int]:
  for value in values or ['']:
    if not value.strip().isdecimal() or not 0 < int(value) < 2**16:
      fix = 'use whole numbers from 1 on, with commas between them'
      raise fields.ConfigError(flag, value, 'is no such number', fix)
  return list(dict.fromkeys(map(int, values)))


def read_prompts(config: configs.Config, run: saved.Saved) -> list[np.ndarray]:
  """Token ids of --prompts, or of the starts of held-out documents."""
  if flags.FLAGS.prompts is None:
    rows = batches.open_rows(config.data, run.tokenizer, 'heldout')
    learned = config.trunk.learned_positions
    found = acceptance.prompts(config.decode, rows, run.tokenizer, learned)
    if found is None:
      fix = 'name a file of them: --prompts=FILE'
      raise fields.ConfigError('--prompts', None, 'there is no held-out text', fix)
    return [row[:n] for row, n in zip(*found, strict=True)]
  path = Path(flags.FLAGS.prompts).expanduser()
  try:
    lines = path.read_text('utf-8-sig').split('\n')
  except (OSError, ValueError) as error:
    raise fields.ConfigError(
      '--prompts', str(path), f'cannot be read: {error}', 'name a UTF-8 file'
    ) from None
  texts = [(f'{path}:{n}', line) for n, line in enumerate(lines, 1) if line]
  if not texts:
    raise fields.ConfigError('--prompts', str(path), 'holds no prompt', 'fill it')
  return [run.tokenizer.encode(line, where=where) for where, line in texts]


def check_drafts(wanted: Sweep, run: saved.Saved) -> None:
  """K as the flag says or as the drafter was trained, and that it can draft so much."""
  part = nnx.merge(run.graphdef, run.params).objectives.get('drafter')
  if not isinstance(part, base.Drafter):
    name, fix = str(run.directory), 'name a run with a drafter'
    raise fields.ConfigError('--checkpoint', name, 'nothing drafts there', fix)
  longest = min(part.config.depth, part.max_draft)
  powers = {K for K in range(1, longest) if K < 4 or K.bit_count() == 1}
  wanted.draft = wanted.draft or sorted(powers | {longest})
  most = max(wanted.draft)
  if most > part.max_draft:
    problem, fix = 'is longer than the drafter drafts', f'use 1 … {part.max_draft}'
    raise fields.ConfigError('--draft', most, problem, fix)
  if wanted.tokens < most + 2:
    problem, fix = f'leaves no round of {most} drafts', f'use at least {most + 2}'
    raise fields.ConfigError('--tokens', wanted.tokens, problem, fix)


def main(config: configs.Config) -> int:
  wanted = sweep()
  out = saved.output(saved.named().parent / 'bench.json')
  assert out is not None
  config.decode.tokens = wanted.tokens
  jax.set_mesh(mesh.make(config.mesh))
  run = saved.restore(config)
  check_drafts(wanted, run)
  prompts = read_prompts(config, run)
  ids = wanted.requests(prompts)
  wanted.stop = () if run.tokenizer.end is None else (run.tokenizer.end,)
  longest = max(map(len, ids)) + wanted.tokens
  plain = Decoder(run.graphdef, run.params, draft=0, longest=longest)
  plain.check(*pad(ids), wanted.settings(len(ids)))
  if wanted.accept is not None:
    terminal.say(f'simulating drafts that are right with probability {wanted.accept}')
  decoders = wanted.decoders(plain, prompts)

  terminal.say('compiling, and comparing texts …')
  parity = compare_texts(decoders, ids, wanted, run)
  samples = compare_samples(decoders, prompts, wanted)
  compiled = compilations(decoders)
  records: dict[type, list[Any]] = {Request: [], Batch: [], Rounds: []}
  per_repeat = sum(3 + (free is not None) for _, free in decoders.values())
  total = per_repeat * (wanted.repeats + 1)
  for found in terminal.watch(measured(decoders, ids, wanted), total, 'measurement'):
    if found[0].repeat:
      records[type(found[0])] += found
    else:
      compiled = compilations(decoders)  # what only measuring needs among it
  late = len(compilations(decoders)) - len(compiled)

  order = list(decoders)  # as the flags have it
  rows = sorted(
    verdict.figures(*records.values()),
    key=lambda own: order.index(Variant(own['draft'], own['rule'], own['batch'])),
  )
  verdicts = [verdict.judge(group) for group in verdict.groups(rows)]
  terminal.say(
    '\n'.join(
      [
        f'{run.directory}, step {run.step}: {len(ids)} requests of up to '
        f'{wanted.tokens} tokens',
        verdict.table(rows, verdicts),
        *said_of_texts(parity, samples),
        f'compile time apart: {sum(c["seconds"] for c in compiled):.1f} s in '
        f'{len(compiled)} programs',
        f'{out}, {out.with_suffix(".png")}',
      ]
    )
  )
  if jax.process_index() == 0:
    summary = {
      'checkpoint': str(run.directory),
      'step': run.step,
      'figures': rows,
      'verdicts': verdicts,
      'parity': parity,
      'samples': samples,
      'sweep': {
        **vars(wanted),
        'requests': len(ids),
        'prompt_tokens': [len(row) for row in ids],
      },
      'conditions': {**metrics.conditions(), 'mesh': mesh.axis_sizes()},
      'mtp': run.conventions,
      'compilations': compiled,
      'compiled_while_measuring': late,
      'records': {
        name: [timing.to_json(one) for one in records[kind]]
        for name, kind in (
          ('requests', Request),
          ('batches', Batch),
          ('rounds', Rounds),
        )
      },
    }
    metrics.write_summary(out, summary)
    picture = io.BytesIO()
    figures.bench_figure(verdict.groups(rows), picture)
    paths.at(out.with_suffix('.png')).write_bytes(picture.getvalue())
  return 0


def compare_texts(
  decoders: dict[Variant, Any], ids: list[Any], wanted: Sweep, run: saved.Saved
) -> list[dict[str, Any]]:
  """Whether greedy texts are the plain ones, variant by variant."""
  plain, found = {}, []
  margin = acceptance.MARGIN[str(run.config.trunk.dtype)]
  for variant, (decoder, _) in terminal.watch(decoders.items(), len(decoders), 'text'):
    texts = greedy_texts(decoder, variant, ids, wanted)
    if any('failed' in out.finish_reason for out in texts):
      name, problem = str(run.directory), 'gives no distribution after some prompt'
      fix = 'name a checkpoint whose parameters are finite'
      raise fields.ConfigError('--checkpoint', name, problem, fix)
    if not variant.draft:
      plain[variant.batch] = texts
      continue
    differ = []
    for n, (ours, theirs) in enumerate(zip(plain[variant.batch], texts, strict=True)):
      start = n * variant.batch
      own = pad(ids[start : start + len(ours.lengths)])
      differ += [
        {**one, 'row': start + one['row']}
        for one in acceptance.divergences(run.graphdef, run.params, *own, ours, theirs)
      ]
    explained = all(one['margin'] <= margin for one in differ)
    found.append(
      {**vars(variant), 'texts': len(ids), 'divergences': differ}
      | {'parity': not differ, 'rounding_explains': explained}
    )
  return found


def compare_samples(
  decoders: dict[Variant, Any], prompts: list[Any], wanted: Sweep
) -> list[dict[str, Any]]:
  """Whether text drawn with drafts has plain text's distribution, rule by rule."""
  if not flags.FLAGS.samples:
    return []
  K, batch, few = max(wanted.draft), max(wanted.batches), prompts[:4]
  temperature = wanted.temperature or 1.0
  # Two rounds, and the prefill's token.
  settings = Settings(min(wanted.tokens, K + 2), temperature, stop=wanted.stop)
  found, plain = [], None
  for rule in terminal.watch(wanted.rules, len(wanted.rules), 'rule'):
    name = rule if wanted.temperature else GREEDY
    decoder, variant = decoders[Variant(K, name, batch)][0], Variant(0, name, batch)
    if decoder.rule != rule:
      decoder = decoder.over(K, rule)
    if plain is None:
      own = decoders[variant][0]
      plain = draws(own, variant, few, settings, flags.FLAGS.samples)
    other = dataclasses.replace(settings, seed=2**31)
    theirs = draws(decoder, variant, few, other, flags.FLAGS.samples)
    compared = two_sample.compare(plain, theirs)
    found.append({'rule': rule, 'draft': K, 'temperature': temperature, **compared})
  return found


def said_of_texts(parity: list[dict[str, Any]], samples: list[dict[str, Any]]):
  differ = [one for own in parity for one in own['divergences']]
  if differ:
    explained = all(own['rounding_explains'] for own in parity)
    yield (
      f'greedy: {len(differ)} of {sum(own["texts"] for own in parity)} texts leave '
      'plain decoding, '
      + ('as' if explained else 'which is NOT what')
      + ' rounding explains'
    )
  else:
    yield 'greedy: all texts equal plain decoding'
  for own in samples:
    same = 'as plain decoding draws' if own['same'] else 'NOT as plain decoding draws'
    if own['rule'] in LOSSY:
      same += ', and it is a lossy rule'
    yield (
      f'drawn by {own["rule"]}, K = {own["draft"]}, at temperature '
      f'{own["temperature"]:g}: {same} (n = {own["n"][0]} and {own["n"][1]}, '
      f'p = {own["p"]:.2g})'
    )


def compilations(decoders: dict[Variant, Any]) -> list[dict[str, Any]]:
  """What was compiled so far, and how long it took."""
  found = {}
  for pair in decoders.values():
    for kind, one in zip(('', 'free drafts'), pair, strict=True):
      for (what, rows, slots, draft), seconds in (
        one.compilations.items() if one else ()
      ):
        found[id(one), what, rows, slots, draft] = {
          'what': what,
          'rows': rows,
          'slots': slots,
          'draft': draft,
          'rule': one.rule,
          'drafts': kind,
          'seconds': seconds,
        }
  return list(found.values())


if __name__ == '__main__':
  define_flags()
  command.run(
    main,
    default=saved.config,
    user_errors=(CheckpointError, DataError, OSError),
    within=processes.together,
  )
