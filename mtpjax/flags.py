"""The command line: `--config=FILE.py:ARG`, overrides of its fields, and absl's flags.

`--config` is an ml_collections flag: ml_collections runs the file, whose
`get_config(arg: str = '')` returns a tree of dataclasses, and `FLAGS.config` holds it.
Annotate `arg` as a `Literal['', 'tiny']` and any other argument is refused.

Overrides, `--config.drafter.depth=2`, are taken off the command line first and applied
by `fields.override`: ml_collections 1.1 cannot set a nullable field back to None, and
raises TypeError on Literal, on unions of classes and on string annotations.
"""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from mtpjax import fields
from mtpjax.fields import ConfigError

_IMPORT = flags.DEFINE_list(
  'import', [], 'modules to import first, so that a checkpoint may name their classes'
)
config_flags.DEFINE_config_file(
  'config',
  help_string='the config file, FILE.py or FILE.py:ARGUMENT',
  lock_config=False,
  sys_argv=[],  # No overrides are left for ml_collections.
)
_MODULE = 'config_config'  # The name under which ml_collections imports the file.
_OPTION = re.compile(r'--?config(?:\.([^=]+))?(?:=(.*))?', re.DOTALL)
_HELP = ('--help', '-help', '-h', '-?', '--helpshort')


class FailedError(Exception):
  """No mistake, but it failed: the exit code is 1, and another try may go well."""


def run(
  main: Callable[..., Any],
  *,
  default: str | Callable[[], Any] | None = None,
  takes_config: bool = True,
  user_errors: tuple[type[Exception], ...] = (),
  within: Callable[[dict[str, Any]], Any] = contextlib.nullcontext,
  argv: list[str] | None = None,
) -> None:
  """Parses the flags, calls `main(config)` and exits; a command's last line.

  Args:
    main: gets the config, its types checked, or nothing if not `takes_config`. An int
      it returns is the exit code.
    default: the config file without `--config`, or a function that makes the config
      and may read absl flags; overrides apply to either.
    takes_config: False for a command without `--config`.
    user_errors: exceptions that, like ConfigError, end with `error: …` and code 2
      instead of a traceback.
    within: makes, of the command as JSON, what is entered before anything else.
    argv: the command line, program name first; `sys.argv` if None.
  """

  def parse(argv):
    with _mistakes_exit(user_errors):
      argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
      spec, overrides, rest = _split(argv)
      if not takes_config and (overrides or spec is not None):
        raise ConfigError('--config', spec, 'no such flag', 'this command takes none')
      source = default if spec is None else spec
      if any(arg in _HELP for arg in rest):
        print(_help(main, takes_config, source))
        sys.exit(0)
      try:
        positional = flags.FLAGS(rest)[1:]
      except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, flags.FLAGS)
        fix = '--help lists them; a config field is --config.FIELD=VALUE'
        fix = f'did you mean --{" or --".join(near)}?' if near else fix
        name, value = f'--{error.flagname}', error.flagvalue.partition('=')[2]
        raise ConfigError(name, value, 'no such flag', fix) from None
      if flags.FLAGS['verbosity'].using_default_value:
        # Libraries' INFO lines are nothing to act on, and app.run would show them.
        flags.FLAGS.verbosity = logging.WARNING
      if positional:
        fix = 'options are written --name=value'
        raise ConfigError('arguments', positional[0], 'not expected', fix)
      return source, overrides

  def call(parsed):
    given = _given(*parsed)
    with _mistakes_exit(user_errors), within(given), _mistakes_exit(user_errors):
      return work(*parsed)

  def work(source, overrides):
    for name in _IMPORT.value or ():
      try:
        importlib.import_module(name)
      except ImportError as error:
        fix = 'name modules that can be imported from here'
        raise ConfigError('--import', name, str(error), fix) from None
    if not takes_config:
      result = main()
    elif source is None:
      fix = 'name a config file: --config=FILE.py'
      raise ConfigError('--config', None, 'a config is needed', fix)
    else:
      config = load(source) if isinstance(source, str) else source()
      flags.FLAGS.config = config
      fields.check_types(config)
      for path, text in overrides.items():
        fields.override(config, path, text)
      result = main(config)
    return result if type(result) is int else 0

  app.run(call, argv=argv, flags_parser=parse)


def _given(source: Any, overrides: dict[str, str]) -> dict[str, Any]:
  """The command and what was said to it, by flag."""
  every = [flags.FLAGS[name] for name in flags.FLAGS]
  own = {f'--{flag.name}': flag.value for flag in every if flag.present}
  found = {f'--config.{name}': text for name, text in overrides.items()}
  spec = {'--config': source} if isinstance(source, str) else {}
  return {'command': Path(sys.argv[0]).stem, **spec, **found, **own}


@contextlib.contextmanager
def _mistakes_exit(user_errors: tuple[type[Exception], ...]):
  code = 2
  try:
    yield
  except KeyboardInterrupt:
    sys.exit(130)
  except BrokenPipeError:  # `| head` has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)
  except flags.Error as error:
    cause, message = error, f'{error}; --help lists the flags'
  except FailedError as error:
    cause, message, code = error, str(error), 1
  except (ConfigError, *user_errors) as error:
    cause, message = error, str(error).strip() or type(error).__name__
  else:
    return
  sys.stderr.write('\n'.join(f'error: {message}'.splitlines()[:3]) + '\n')
  raise SystemExit(code) from cause


def _split(argv: list[str]) -> tuple[str | None, dict[str, str], list[str]]:
  """Splits off `--config` and its overrides; the last of each name counts."""
  spec, overrides, rest, args = None, {}, [], list(argv)
  while args and args[0] != '--':
    arg = args.pop(0)
    match = _OPTION.fullmatch(arg)
    if not match:
      rest.append(arg)
      continue
    path, text = match.groups()
    if text is None and args and not re.match('-+[A-Za-z]', args[0]):
      text = args.pop(0)  # `--config.name value`; a negative number is a value.
    if path:
      overrides[path] = 'true' if text is None else text
    else:
      spec = text or ''
  return spec, overrides, rest + args


def _help(main, takes_config: bool, source: str | Callable[[], Any] | None) -> str:
  module = sys.modules[main.__module__]
  lines = [inspect.cleandoc(module.__doc__ or main.__doc__ or ''), '', 'flags:']
  for flag in [*flags.FLAGS.get_key_flags_for_module(module), flags.FLAGS['import']]:
    lines.append(f'  --{flag.name}={flag.default_as_str or ""}  {flag.help}')
  if takes_config:
    lines.append('  --config=FILE.py[:ARGUMENT]  the config; with --help, its fields')
  if takes_config and isinstance(source, str):
    lines += ['', f'fields of {source}:']
    lines += [f'  --config.{line}' for line in fields.describe(load(source))]
  return '\n'.join(lines)


def load(spec: str) -> Any:
  """Returns what `get_config` of the config file returns, as `FLAGS.config` then does.

  Args:
    spec: `FILE.py`, or `FILE.py:ARGUMENT` for `get_config('ARGUMENT')`.

  Raises:
    ConfigError: no such file; no `get_config`; an argument it does not take; or the
      file raised, in which case file, line and exception are named.
  """
  path, _, arg = spec.partition(':')
  if not Path(path).is_file():
    near = sorted(str(p) for p in Path(path).parent.glob('*.py'))
    problem = f'no such file from {os.getcwd()}'
    raise ConfigError('--config', spec, problem, fields.suggest(path, near))
  # ml_collections would run a second file in the module of the first one.
  sys.modules.pop(_MODULE, None)
  # Its import warns. No catch_warnings: filters that imported modules set must stay.
  warnings.filterwarnings('ignore', r'the load_module\(\) method', DeprecationWarning)
  flag = flags.FLAGS['config']
  with _file_errors(spec, path):
    try:
      flag.parse(spec)
      hasattr(flag.value, '_')  # An OSError of the file is kept until an access.
    finally:
      _check_argument(spec, arg)
  if not dataclasses.is_dataclass(flag.value) or isinstance(flag.value, type):
    fix = 'return an instance of a config dataclass'
    raise ConfigError('--config', spec, f'get_config returned {flag.value!r:.80}', fix)
  return flag.value


def _check_argument(spec: str, arg: str) -> None:
  get_config = getattr(sys.modules.get(_MODULE), 'get_config', None)
  if arg and get_config is not None:
    variants = typing.get_args(typing.get_type_hints(get_config).get('arg'))
    if variants and arg not in variants:
      fix = fields.suggest(arg, filter(None, variants))
      raise ConfigError('--config', spec, f'no variant {arg!r}', fix)


@contextlib.contextmanager
def _file_errors(spec: str, path: str):
  try:
    yield
  except ConfigError:
    raise
  except Exception as caught:
    # absl and ml_collections raise errors of their own while handling the file's.
    chain: list[BaseException] = [caught]
    while below := chain[-1].__cause__ or chain[-1].__context__:
      chain.append(below)
    error = next((e for e in chain if path in dict(_frames(e))), chain[-1])
    if isinstance(error, ConfigError):
      raise error from None
    frames = _frames(error)
    # The line of the file, and where the exception was raised if that is elsewhere.
    places = [frame for frame in frames if frame[0] == path][-1:]
    places += frames[-1:] if places else []
    where = ', from '.join(f'{name}:{line}' for name, line in dict.fromkeys(places))
    text = ' '.join(str(error).split())[:300]
    problem = f'{where or path}: {type(error).__name__}: {text}'
    raise ConfigError('--config', spec, problem, 'correct the file') from error


def _frames(error: BaseException) -> list[tuple[str, Any]]:
  frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
  if isinstance(error, SyntaxError):
    frames.append((str(error.filename), error.lineno))
  return frames
