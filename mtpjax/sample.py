"""Completes prompts with a checkpoint's model and its own drafts.

  python -m mtpjax.sample --checkpoint=runs/quickstart --prompt='def main('
  python -m mtpjax.sample --checkpoint=runs/quickstart --prompts=FILE --json=out.json

Greedy unless --temperature says otherwise. A single prompt streams; on a terminal,
accepted drafts are underlined. --prompts has a prompt a line; of a .jsonl file each
line is a JSON string, or an object with `prompt` and settings of its own: budget,
temperature, top_k, top_p, min_p, seed, draft, min_tokens, repetition_penalty,
presence_penalty, frequency_penalty, logit_bias (an object of values by token id) and
stop_strings (an array). --draft=0 decodes plainly. For many prompts of very uneven
texts, --throughput. --json=- writes JSON to standard output, and nothing else.
"""

import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from mtpjax import config as configs
from mtpjax import fields, mesh, metrics, processes, saved, terminal
from mtpjax import flags as command
from mtpjax.checkpoint import CheckpointError
from mtpjax.data.sources import DataError
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import LOSSY, Decoder
from mtpjax.sampling.sampler import Completion, Sampler
from mtpjax.sampling.stats import Stats

_PROMPT = flags.DEFINE_multi_string('prompt', [], 'a text to complete; may be repeated')
_PROMPTS = flags.DEFINE_string('prompts', None, 'a file, a prompt a line, or .jsonl')
_TOKENS = flags.DEFINE_integer('tokens', 128, 'new tokens of each prompt, at most')
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 takes the most likely token')
_TOP_K = flags.DEFINE_integer('top_k', 0, 'only the k most likely tokens; 0 is off')
_TOP_P = flags.DEFINE_float('top_p', 1.0, 'only the fewest tokens with this; 1 is off')
_MIN_P = flags.DEFINE_float('min_p', 0.0, 'only tokens with this share of the largest')
_SEED = flags.DEFINE_integer('seed', 0, 'of the first prompt; the next has one more')
_STOP = flags.DEFINE_multi_string(
  'stop', [], 'text of one token that ends it, as the end of a document does'
)
_STOP_STRING = flags.DEFINE_multi_string(
  'stop_string', [], 'any text that ends it, and is none of it; may be repeated'
)
_MIN_TOKENS = flags.DEFINE_integer('min_tokens', 0, 'new tokens before a stop may come')
_REPETITION = flags.DEFINE_float(
  'repetition_penalty', 1.0, 'divides logits of tokens in prompt and text; 1 is off'
)
_PRESENCE = flags.DEFINE_float(
  'presence_penalty', 0.0, 'taken off logits of tokens in the text'
)
_FREQUENCY = flags.DEFINE_float(
  'frequency_penalty', 0.0, 'the same for every time that it is there'
)
_BIAS = flags.DEFINE_multi_string(
  'logit_bias', [], 'ID:VALUE, added to the logit of a token; -inf bans it'
)
_DRAFT = flags.DEFINE_integer('draft', None, 'drafts a round; default as trained')
_RULE = flags.DEFINE_string('rule', 'rejection', 'how drafts of drawn text are judged')
_SAMPLES = flags.DEFINE_integer('samples', 1, 'texts of each prompt')
_ROWS = flags.DEFINE_integer('rows', 32, 'prompts side by side, at most')
_THROUGHPUT = flags.DEFINE_bool(
  'throughput', False, 'a row whose text has ended takes the next prompt'
)
_TREE = flags.DEFINE_string(
  'tree', None, "drafts that branch: '4x2x1' (children by depth) or 'dynamic:8:24'"
)
_DRAFT_COST = flags.DEFINE_float(
  'draft_cost', None, 'of one more draft, in plain passes: draft as many as pay'
)
_CACHE = flags.DEFINE_string(
  'cache', None, 'keeps keys and values in bfloat16 or int8; default as computed'
)
_LONGEST = flags.DEFINE_integer('longest', 4096, 'tokens of prompt and text, at most')
saved.define_flags()
processes.define_flags()
for _module in (saved, processes):
  flags.adopt_module_key_flags(_module)


def read_prompts() -> list[tuple[str, dict[str, Any]]]:
  """Those of --prompt and --prompts, in this order, with settings of their own."""
  prompts: list[tuple[str, dict[str, Any]]] = [(text, {}) for text in _PROMPT.value]
  if _PROMPTS.value is not None:
    path = Path(_PROMPTS.value).expanduser()
    try:
      lines = path.read_bytes().decode('utf-8-sig').split('\n')
    except (OSError, ValueError) as error:
      raise fields.ConfigError(
        '--prompts', str(path), f'cannot be read: {error}', 'name a UTF-8 file'
      ) from None
    lines = [line.removesuffix('\r') for line in lines]
    for number, line in enumerate(lines[: -1 if not lines[-1] else None], 1):
      prompts.append(_prompt(line, f'{path}:{number}', path.suffix.lower() == '.jsonl'))
  if not prompts and _PROMPTS.value is not None:
    raise fields.ConfigError('--prompts', _PROMPTS.value, 'holds no line', 'fill it')
  if not prompts:
    raise fields.ConfigError(
      '--prompt', None, 'there is no prompt', 'use --prompt=TEXT or --prompts=FILE'
    )
  return prompts


_OWN = (
  *('budget', 'temperature', 'top_k', 'top_p', 'min_p', 'seed', 'draft', 'min_tokens'),
  *('repetition_penalty', 'presence_penalty', 'frequency_penalty'),
  *('logit_bias', 'stop_strings'),
)


def _prompt(line: str, where: str, is_json: bool) -> tuple[str, dict[str, Any]]:
  prompt, own = line, {}
  if is_json and line:
    try:
      prompt = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise fields.ConfigError(
        where, line[:40], f'is no JSON: {error}', 'correct it'
      ) from None
    if isinstance(prompt, dict):
      own = {k: v for k, v in prompt.items() if k != 'prompt'}
      if isinstance(own.get('logit_bias'), dict):  # JSON has no whole numbers for keys
        pairs = own['logit_bias'].items()
        own['logit_bias'] = tuple(_pair(token, by, where) for token, by in pairs)
      if isinstance(own.get('stop_strings'), list):
        own['stop_strings'] = tuple(own['stop_strings'])
      prompt = prompt.get('prompt')
  for name in own:
    if name not in _OWN:
      fix = fields.suggest(name, ['prompt', *_OWN])
      raise fields.ConfigError(where, name, 'is no setting of a prompt', fix)
  if not isinstance(prompt, str) or not prompt:
    problem = 'is empty' if prompt == '' else 'has no text for a prompt'
    raise fields.ConfigError(where, line[:40], problem, 'give each line a prompt')
  return prompt, own


def _pair(token: str, value: Any, where: str) -> tuple[int, float]:
  """A token's bias. Raises ConfigError on what is none."""
  try:
    return int(token), float(value)
  except (TypeError, ValueError):
    said, fix = f'{token}:{value}', 'use the id of a token and a number, as 17:-1.5'
    raise fields.ConfigError(where, said, 'is no bias of a token', fix) from None


def biases() -> tuple[tuple[int, float], ...]:
  pairs = [text.partition(':') for text in _BIAS.value]
  return tuple(_pair(token, value, '--logit_bias') for token, _, value in pairs)


def stop_ids(tokenizer: Any) -> tuple[int, ...]:
  found = [] if tokenizer.end is None else [tokenizer.end]
  for text in _STOP.value:
    ids = tokenizer.encode(text, where='--stop')
    if len(ids) != 1:
      fix = f'a stop is a single token; use --stop_string={text}'
      raise fields.ConfigError('--stop', text, f'is {len(ids)} tokens', fix)
    found.append(int(ids[0]))
  return tuple(found)


@contextlib.contextmanager
def _named_as_flags(given: list[tuple[str, dict[str, Any]]]) -> Iterator[None]:
  """A setting is refused by the flag that it came from."""
  try:
    yield
  except fields.ConfigError as error:
    name = error.field.rpartition('.')[2]
    own = any(name in settings for _, settings in given)
    flags_of_decoder = ('rule', 'tree', 'draft_cost', 'longest', 'cache')
    if own or name not in (*_OWN, *flags_of_decoder, 'samples', 'rows'):
      raise
    named = {'budget': 'tokens', 'stop_strings': 'stop_string'}
    flag = f'--{named.get(name, name)}'
    raise fields.ConfigError(flag, error.value, error.problem, error.fix) from None


def main(config: configs.Config) -> int:
  given = read_prompts()
  read = f'{len(given)}, checksum {zlib.crc32(json.dumps(given).encode()):08x}'
  processes.same({'prompts': read}, 'let all of them read the same')
  with _named_as_flags(given):
    return complete(given, config)


def complete(given: list[tuple[str, dict[str, Any]]], config: configs.Config) -> int:
  silent = flags.FLAGS.json == '-'
  out = None if silent else saved.output()
  jax.set_mesh(mesh.make(config.mesh))
  run = saved.restore(config)
  common = {
    'budget': _TOKENS.value,
    'temperature': _TEMPERATURE.value,
    'top_k': _TOP_K.value,
    'top_p': _TOP_P.value,
    'min_p': _MIN_P.value,
    'stop': stop_ids(run.tokenizer),
    'stop_strings': tuple(_STOP_STRING.value),
    'min_tokens': _MIN_TOKENS.value,
    'repetition_penalty': _REPETITION.value,
    'presence_penalty': _PRESENCE.value,
    'frequency_penalty': _FREQUENCY.value,
    'logit_bias': biases(),
  }
  prompts = [text for text, _ in given]
  settings = [
    Settings(**{**common, 'seed': _SEED.value + n, **own})
    for n, (_, own) in enumerate(given)
  ]
  decoder = Decoder(
    run.graphdef,
    run.params,
    draft=_DRAFT.value,
    rule=_RULE.value,
    tree=_TREE.value,
    draft_cost=_DRAFT_COST.value,
    longest=_LONGEST.value,
    cache=_CACHE.value,
  )
  sampler = Sampler(decoder, run.tokenizer, _ROWS.value)

  began = time.monotonic()
  if len(prompts) == _SAMPLES.value == 1 and not silent:
    texts = [stream(sampler, prompts[0], settings[0])]
  else:
    call = sampler.throughput if _THROUGHPUT.value else sampler
    texts = call(
      prompts, settings, lambda calls: terminal.watch(calls, len(calls)), _SAMPLES.value
    )
    if not silent:
      for one in texts:
        terminal.say(f'{one.prompt}{marked(one.pieces)}\n')
  compiling = sum(decoder.compilations.values())
  seconds = time.monotonic() - began - compiling

  stats = texts[0].stats
  for one in texts[1:]:
    stats = stats + one.stats
  if not silent:
    terminal.say(summary(stats, seconds, compiling, run))
    if decoder.rule in LOSSY and any(own.temperature > 0 for own in settings):
      terminal.say(f'--rule={decoder.rule} is lossy: this is not how the model draws')
  if (out or silent) and jax.process_index() == 0:
    each = [own.sample(n) for own in settings for n in range(_SAMPLES.value)]
    figures = {
      'checkpoint': str(run.directory),
      'step': run.step,
      'completions': [
        as_json(one) | {'settings': vars(own)}
        for one, own in zip(texts, each, strict=True)
      ],
      **stats.to_json(),
      'tokens_per_second': stats.delivered / seconds if seconds > 0 else None,
      'seconds': seconds,
      'compile_seconds': compiling,
      'compilations': len(decoder.compilations),
      'draft': decoder.draft,
      'rule': decoder.rule,
      'exact': decoder.rule not in LOSSY,
      'tree': _TREE.value,
      'draft_cost': decoder.draft_cost,
      'cache': decoder.cache,
      'mtp': run.conventions,
      'conditions': {**metrics.conditions(), 'mesh': mesh.axis_sizes()},
    }
    if out:
      metrics.write_summary(out, figures)
    else:
      print(metrics.to_json(figures, indent=2))
  failed = sum(one.finish_reason == 'failed' for one in texts)
  if failed:
    print(
      f'error: the model gave no distribution for {failed} of {len(texts)} prompts: '
      'its logits are not finite; use another --step',
      file=sys.stderr,
    )
  return 1 if failed else 0


def stream(sampler: Sampler, prompt: str, settings: Settings) -> Completion:
  """Says the text as it comes."""
  rounds = sampler.stream(prompt, settings)  # refused before anything is said
  speaks, said, one = jax.process_index() == 0, 0, None
  if speaks:
    print(prompt, end='', flush=True)
  for (one,) in rounds:
    fresh, skip = [], said
    for text, drafted in one.pieces:
      fresh += [(text[skip:], drafted)] if len(text) > skip else []
      skip = max(0, skip - len(text))
    said = len(one.text)
    if speaks:
      print(marked(fresh), end='', flush=True)
  terminal.say('\n')
  assert one is not None
  return one


def marked(pieces: list[tuple[str, bool]]) -> str:
  """Accepted drafts underlined, where somebody looks at a terminal."""
  if not sys.stdout.isatty() or 'NO_COLOR' in os.environ:
    return ''.join(text for text, _ in pieces)
  return ''.join(f'\033[4m{t}\033[24m' if drafted else t for t, drafted in pieces)


def summary(stats: Stats, seconds: float, compiling: float, run: saved.Saved) -> str:
  def figures(values):
    return ' '.join('-' if x is None else f'{x:.3f}' for x in values)

  lines = [
    f'{stats.delivered} tokens in {stats.passes} passes of the trunk: '
    f'{figures([stats.tokens_per_pass])} tokens a pass, '
    f'{stats.delivered / seconds:,.1f} tokens/s ({compiling:.1f} s of compiling apart)'
  ]
  if len(stats.proposed) and stats.proposed.any():
    lines += [
      f'acceptance length τ {figures([stats.tau])}, '
      f'rate {figures([stats.acceptance_rate])}',
      f'acceptance by position {figures(stats.acceptance_by_position)}, '
      f'given those before {figures(stats.conditional_acceptance)}',
    ]
  return '\n'.join([*lines, f'{run.directory}, step {run.step}'])


def as_json(one: Completion) -> dict[str, Any]:
  found = vars(one) | {'stats': one.stats.to_json()}
  found['pieces'] = [{'text': t, 'drafted': drafted} for t, drafted in one.pieces]
  return found


if __name__ == '__main__':
  command.run(
    main,
    default=saved.config,
    user_errors=(CheckpointError, DataError, OSError),
    within=processes.together,
  )
