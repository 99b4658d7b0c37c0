"""Configs on the command line and on disk; this file knows no concrete config class.

A config is a tree of mutable dataclasses. A config file is Python that defines
`get_config(arg: str = '')`; `--config=FILE.py:ARG` names it and
`--config.drafter.depth=2` overrides one field. Annotate `arg` as a
`Literal['', 'tiny']` and any other argument is refused, with the nearest name.

Our own reader in place of ml_collections' `config_flags` (1.1), which cannot set a
nullable field back to None, raises TypeError on Literal, on unions of classes and on
string annotations, and loads files through a deprecated interface.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union

from absl import app, flags

_IMPORT = flags.DEFINE_list(
  'import', [], 'modules to import first, so that a checkpoint may name their classes'
)
_OPTION = re.compile(r'--?config(?:\.([^=]+))?(?:=(.*))?', re.DOTALL)
_HELP = ('--help', '-help', '-h', '-?', '--helpshort')
_UNION = (Union, types.UnionType)
_NAMES = {
  int: 'a whole number',
  float: 'a number',
  bool: 'true or false',
  str: 'text',
  types.NoneType: 'None',
}


class ConfigError(ValueError):
  """A user's mistake: which field, its value, what is wrong, and what to do instead.

  `field` is the dotted path below the config ('drafter.depth'), or a flag ('--config').
  """

  def __init__(self, field: str, value: Any, problem: str, fix: str):
    super().__init__(field, value, problem, fix)
    self.field, self.value, self.problem, self.fix = field, value, problem, fix

  def __str__(self) -> str:
    return f'{self.field} = {_brief(self.value)}: {self.problem}; {self.fix}'


# --- The command ----------------------------------------------------------------------


def run(
  main: Callable[..., Any],
  *,
  default: str | Callable[[], Any] | None = None,
  takes_config: bool = True,
  user_errors: tuple[type[Exception], ...] = (),
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
    argv: the command line, program name first; `sys.argv` if None.
  """

  def parse(argv):
    with _mistakes_exit(user_errors):
      argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
      spec, overrides, rest = _split(argv) if takes_config else (None, {}, argv)
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
      if positional:
        fix = 'options are written --name=value'
        raise ConfigError('arguments', positional[0], 'not expected', fix)
      return source, overrides

  def call(parsed):
    source, overrides = parsed
    with _mistakes_exit(user_errors):
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
        check_types(config)
        for path, text in overrides.items():
          override(config, path, text)
        result = main(config)
    return result if type(result) is int else 0

  app.run(call, argv=argv, flags_parser=parse)


@contextlib.contextmanager
def _mistakes_exit(user_errors: tuple[type[Exception], ...]):
  try:
    yield
  except flags.Error as error:
    message = f'{error}; --help lists the flags'
  except (ConfigError, *user_errors) as error:
    message = str(error).strip() or type(error).__name__
  else:
    return
  sys.stderr.write('\n'.join(f'error: {message}'.splitlines()[:3]) + '\n')
  sys.exit(2)


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
    for at, node in _configs(load(source)):
      for name, hint in _hints(type(node)).items():
        option = f'--config.{_join(at, name)}={_brief(getattr(node, name))}'
        lines.append(f'  {option}  {_describe(hint)}')
  return '\n'.join(lines)


# --- The config file ------------------------------------------------------------------


def load(spec: str) -> Any:
  """Returns what `get_config` of the config file returns.

  Args:
    spec: `FILE.py`, or `FILE.py:ARGUMENT` for `get_config('ARGUMENT')`.

  Raises:
    ConfigError: no such file; no `get_config`; an argument it does not take; or the
      file raised, in which case file, line and exception are named.
  """
  path, _, arg = spec.partition(':')
  if not Path(path).is_file():
    near = sorted(str(p) for p in Path(path).parent.glob('*.py'))
    raise ConfigError('--config', spec, 'no such file', _suggest(path, near))
  # Registered, or the annotations of a class defined in the file cannot be resolved.
  module = types.ModuleType(f'config file {path}')
  module.__file__ = path
  sys.modules[module.__name__] = module
  with _file_errors(spec, path):
    exec(compile(Path(path).read_bytes(), path, 'exec'), module.__dict__)
    get_config = module.get_config
    variants = typing.get_args(typing.get_type_hints(get_config).get('arg'))
  if arg and variants and arg not in variants:
    fix = _suggest(arg, filter(None, variants))
    raise ConfigError('--config', spec, f'no variant {arg!r}', fix)
  with _file_errors(spec, path):
    config = get_config(arg) if arg else get_config()
  if not _is_config(config):
    fix = 'return an instance of a config dataclass'
    raise ConfigError('--config', spec, f'get_config returned {_brief(config)}', fix)
  return config


@contextlib.contextmanager
def _file_errors(spec: str, path: str):
  try:
    yield
  except ConfigError:
    raise
  except Exception as error:
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
      frames.append((str(error.filename), error.lineno))
    # The line of the file, and where the exception was raised if that is elsewhere.
    places = [frame for frame in frames if frame[0] == path][-1:] + frames[-1:]
    where = ', from '.join(f'{name}:{line}' for name, line in dict.fromkeys(places))
    text = ' '.join(str(error).split())[:300]
    problem = f'{where}: {type(error).__name__}: {text}'
    raise ConfigError('--config', spec, problem, 'correct the file') from error


# --- Fields and their types -----------------------------------------------------------


def override(config: Any, path: str, text: str) -> None:
  """Sets one field, given as on the command line: ('drafter.depth', '2').

  An element of a tuple of configs is `objectives[0].depth`.

  Raises:
    ConfigError: no such field, or not a value of its type.
  """
  node, at, parent = config, '', None
  for name in re.findall(r'[^.\[\]]+', path) or ['']:
    parent, children = node, dict(_children(node))
    if not _is_config(node):
      name = f'[{name}]'
    if name not in children:
      if _is_config(node):
        raise _no_field(config, node, at, name, path, text)
      fix = f'count from 0, or set {at} as a whole'
      if node is None:
        fix = f'choose its class in the config file, as in {at}=module.Config()'
      raise ConfigError(path, text, f'no {name[1:-1]} in {at} = {_brief(node)}', fix)
    node, at = children[name], _join(at, name)
  if not _is_config(parent):
    fix = f'set all of it, --config.{at.rpartition("[")[0]}=1,2, or a field of a config'
    raise ConfigError(path, text, 'an element cannot be replaced', fix)
  hint = _hints(type(parent))[name]
  try:
    value = _parse(text, hint)
    if _is_config(node) and value is not None:
      raise ValueError
  except ValueError:
    fix = f'write for example --config.{path}={node}'
    if typing.get_origin(hint) is Literal:
      fix = _suggest(text, map(str, typing.get_args(hint)))
    if below := [at for at, _ in _configs(node, at)]:
      fix = f'set its fields, --config.{below[0]}.FIELD, or its class in the file'
    raise ConfigError(path, text, f'not {_describe(hint)}', fix) from None
  setattr(parent, name, value)


def check_types(config: Any) -> None:
  """Holds every field of the tree to its annotation, as assignment does not.

  Raises:
    ConfigError: a value of another type, NaN, or an attribute that is no field.
  """
  for at, node in _configs(config):
    hints = _hints(type(node))
    for name, value in getattr(node, '__dict__', {}).items():
      known = inspect.getattr_static(type(node), name, None)
      if name not in hints and not isinstance(known, functools.cached_property):
        raise _no_field(config, node, at, name, _join(at, name), value)
    for name, value in _children(node):
      if not _fits(value, hints[name]):
        expected = _describe(hints[name])
        fix = f'assign {expected}'
        if isinstance(value, list):
          fix = 'write a tuple: (1, 2), and (1,) for one element'
        problem = f'{type(value).__name__} where {expected} is expected'
        raise ConfigError(_join(at, name), value, problem, fix)


def _no_field(config, node, at: str, name: str, path: str, value: Any) -> ConfigError:
  elsewhere = [_join(a, name) for a, c in _configs(config) if name in _hints(type(c))]
  fix = _suggest(name, _hints(type(node)), elsewhere)
  where = f'config.{at} ({_class_path(type(node))})' if at else 'config'
  return ConfigError(path, value, f'no field {name!r} in {where}', fix)


def _suggest(name: str, names: Iterable[str], otherwise: Iterable[str] = ()) -> str:
  by_lower = {n.lower(): n for n in names}
  near = difflib.get_close_matches(name.lower(), by_lower)
  if near := [by_lower[n] for n in near] or list(otherwise):
    return f'did you mean {" or ".join(map(repr, near))}?'
  return f'choose from: {", ".join(by_lower.values()) or "nothing is there"}'


def _is_config(value: Any) -> bool:
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
  if _is_config(value):
    yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
  elif isinstance(value, tuple | list):
    yield from ((f'[{i}]', element) for i, element in enumerate(value))
  elif isinstance(value, dict):
    yield from ((f'[{key}]', element) for key, element in value.items())


def _configs(value: Any, at: str = '') -> Iterator[tuple[str, Any]]:
  """Every dataclass in the tree with its path, parents first."""
  if _is_config(value):
    yield at, value
  for name, child in _children(value):
    yield from _configs(child, _join(at, name))


def _join(at: str, name: str) -> str:
  return f'{at}.{name}' if at and not name.startswith('[') else at + name


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
  hints = typing.get_type_hints(cls)
  return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in _UNION:
    return any(_fits(value, arg) for arg in args)
  if origin is Literal:
    return any(value == arg and type(value) is type(arg) for arg in args)
  if hint in (int, float) and isinstance(value, bool):
    return False
  if hint is float:
    return isinstance(value, int | float) and value == value  # NaN is no setting.
  if origin is tuple and isinstance(value, tuple):
    args = args[:1] * len(value) if args[-1:] == (...,) else args
    return len(args) == len(value) and all(map(_fits, value, args))
  if origin is dict and isinstance(value, dict):
    return all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
  try:
    return isinstance(value, origin or hint)
  except TypeError:  # Any, or a Protocol that cannot be checked.
    return True


def _parse(text: str, hint: Any) -> Any:
  """Reads a value of the annotated type; ValueError without a message if it is none."""
  for word, value in (('none', None), ('true', True), ('false', False)):
    if text.lower() == word and _fits(value, hint):
      return value
  arms = typing.get_args(hint) if typing.get_origin(hint) in _UNION else (hint,)
  for arm in arms:
    if tuple in (arm, typing.get_origin(arm)):
      return _parse_tuple(text.strip(), typing.get_args(arm) or (Any, ...))
  kinds = (float, str) if float in arms and int not in arms else (int, float, str)
  for kind in kinds:
    with contextlib.suppress(ValueError):
      if _fits(value := kind(text), hint):
        return value
  raise ValueError


def _parse_tuple(text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
  inner = text[1:-1] if text[:1] + text[-1:] in ('()', '[]') else text
  parts = [part.strip() for part in inner.split(',')]
  if set(inner) & set('()[]\'"'):  # Nested or quoted.
    try:
      literal = ast.literal_eval(text)
    except SyntaxError:
      raise ValueError from None
    literal = literal if isinstance(literal, tuple | list) else (literal,)
    parts = [part if isinstance(part, str) else repr(part) for part in literal]
  elif not parts[-1]:
    parts.pop()
  args = args[:1] * len(parts) if args[-1:] == (...,) else args
  if len(parts) != len(args):
    raise ValueError
  return tuple(map(_parse, parts, args))


def _describe(hint: Any) -> str:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in _UNION:
    return ' or '.join(map(_describe, args))
  if origin is Literal:
    return ' or '.join(map(repr, args))
  if origin is None and isinstance(hint, type):
    return _NAMES.get(hint) or _class_path(hint)
  return str(hint)


def _brief(value: Any) -> str:
  text = ' '.join(repr(value).split())
  return text if len(text) <= 80 else text[:77] + '...'


# --- JSON -----------------------------------------------------------------------------


def _class_path(cls: type) -> str:
  return f'{cls.__module__}:{cls.__qualname__}'


def to_json(config: Any, at: str = '') -> Any:
  """Returns the config (`at`: its path, for errors) as JSON's types, losslessly.

  Raises:
    ConfigError: a value JSON cannot hold exactly (a list among them: lists are how
      tuples are saved), or a class that cannot be found again by name.
  """
  if config is None or type(config) in (bool, int, float, str):
    return config
  saved = {name: to_json(child, _join(at, name)) for name, child in _children(config)}
  if type(config) is tuple:
    return list(saved.values())
  if type(config) is dict and all(type(k) is str and k != 'class' for k in config):
    return {name[1:-1]: child for name, child in saved.items()}
  if not _is_config(config) or '<locals>' in type(config).__qualname__:
    problem = f'{_class_path(type(config))} cannot be saved'
    fix = 'use None, numbers, text, tuples and dataclasses at the top of a module'
    raise ConfigError(at or 'config', config, problem, fix)
  return {'class': _class_path(type(config)), **saved}


def from_json(data: Any) -> Any:
  """Returns the config that `to_json` saved; a field it lacks gets its default.

  A saved config is data, not a way to run code: a class is taken from `mtpjax` or from
  a module that is already imported (by the command, its config file or `--import`),
  and only if it is a dataclass.

  Raises:
    ConfigError: an unknown class or field, or a value of another type.
  """
  if not isinstance(data, dict) or 'class' not in data:
    raise ConfigError('config', data, 'names no class', 'pass what to_json returned')
  config = _decode(data, '')
  check_types(config)
  return config


def _decode(value: Any, at: str) -> Any:
  if isinstance(value, list):
    return tuple(_decode(child, _join(at, name)) for name, child in _children(value))
  if not isinstance(value, dict):
    return value
  saved = {name: _decode(child, _join(at, name)) for name, child in value.items()}
  if 'class' not in value:
    return saved
  cls = _find_class(saved.pop('class'), at)
  for name in saved:
    if name not in _hints(cls):
      problem = f'no field {name!r} in {value["class"]}'
      fix = _suggest(name, _hints(cls)) + ' (or use the version that saved it)'
      raise ConfigError(_join(at, name), value[name], problem, fix)
  init = {f.name for f in dataclasses.fields(cls) if f.init}
  try:
    config = cls(**{name: child for name, child in saved.items() if name in init})
  except (TypeError, ValueError) as error:
    fix = 'use the version that saved it'
    raise ConfigError(at or 'config', value, str(error), fix) from error
  for name, child in saved.items():
    # What __post_init__ derived gives way to what was saved; frozen classes included.
    object.__setattr__(config, name, child)
  return config


def _find_class(path: Any, at: str) -> Any:
  module_name, _, name = str(path).rpartition(':')
  if module_name.split('.')[0] == 'mtpjax':
    with contextlib.suppress(ModuleNotFoundError):
      importlib.import_module(module_name)
  module = sys.modules.get(module_name)
  if module is None:
    problem = f'module {module_name!r} is not imported'
    fix = 'if it is there and you trust it, --import=MODULE'
    raise ConfigError(_join(at, 'class'), path, problem, fix)
  found = functools.reduce(lambda o, n: getattr(o, n, None), name.split('.'), module)
  if not _is_dataclass_type(found):
    fix = _suggest(name, (k for k, v in vars(module).items() if _is_dataclass_type(v)))
    problem = f'no dataclass {name!r} in {module_name}'
    raise ConfigError(_join(at, 'class'), path, problem, fix)
  return found


def _is_dataclass_type(value: Any) -> bool:
  return dataclasses.is_dataclass(value) and isinstance(value, type)


def differences(a: Any, b: Any, at: str = '') -> list[str]:
  """Returns a line for each field in which two saved configs differ: `field: a → b`."""
  if isinstance(a, list) and isinstance(b, list) and dict in map(type, a + b):
    a, b = dict(_children(a)), dict(_children(b))
  if isinstance(a, dict) and isinstance(b, dict) and a.get('class') == b.get('class'):
    absent = {'class': 'absent'}
    rows = [(a.get(k, absent), b.get(k, absent), _join(at, k)) for k in {**a, **b}]
    return [line for row in rows for line in differences(*row)]
  if a == b:
    return []
  old, new = (
    v['class'] if isinstance(v, dict) and 'class' in v else _brief(v) for v in (a, b)
  )
  return [f'{at or "config"}: {old} → {new}']
