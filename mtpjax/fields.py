"""Typed fields of a config tree: checks, overrides, JSON; no concrete config class.

A config is a tree of mutable dataclasses, and each field is held to its annotation:
numbers, text, None, Literal, tuples, dicts, further dataclasses, and unions of them.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union

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


def override(config: Any, path: str, text: str) -> None:
  """Sets one field, given as on the command line: ('drafter.depth', '2').

  `objectives[0].depth` is in a tuple of configs, `weights.code` the value of a dict.

  Raises:
    ConfigError: no such field, not a value of its type, or a frozen class.
  """
  node, at, parent, hint = config, '', None, None
  for name in re.findall(r'[^.\[\]]+', path) or ['']:
    parent, children = node, dict(_children(node))
    if not _is_config(node):
      name = f'[{name}]'
    if name not in children:
      if _is_config(node):
        raise _no_field(config, node, at, name, path, text)
      fix = f'count from 0, or set {at} as a whole'
      if isinstance(node, dict):
        fix = suggest(name[1:-1], map(str, node))
      if node is None:
        fix = f'choose its class in the config file, as in {at}=module.Config()'
      raise ConfigError(path, text, f'no {name[1:-1]} in {at} = {_brief(node)}', fix)
    hint = _hints(type(node))[name] if _is_config(node) else _value_hint(hint)
    node, at = children[name], _join(at, name)
  if not _is_config(parent) and not isinstance(parent, dict):
    fix = f'set all of it, --config.{at.rpartition("[")[0]}=1,2, or a field of a config'
    raise ConfigError(path, text, 'an element cannot be replaced', fix)
  try:
    value = _parse(text, hint)
    if _is_config(node) and value is not None:
      raise ValueError
  except ValueError:
    fix = f'write for example --config.{path}={node}'
    if isinstance(node, dict) and node:
      fix = f'set one of its values, --config.{at}.{next(iter(node))}=VALUE'
    if typing.get_origin(hint) is Literal:
      fix = suggest(text, map(str, typing.get_args(hint)))
    if below := [at for at, _ in _configs(node, at)]:
      fix = f'set its fields, --config.{below[0]}.FIELD, or its class in the file'
    raise ConfigError(path, text, f'not {_in_words(hint)}', fix) from None
  if isinstance(parent, dict):
    parent[next(key for key in parent if f'[{key}]' == name)] = value
    return
  try:
    setattr(parent, name, value)
  except dataclasses.FrozenInstanceError:
    problem = f'{_class_path(type(parent))} is frozen'
    raise ConfigError(path, text, problem, 'set it in the config file') from None


def check_types(config: Any) -> None:
  """Holds every field of the tree to its annotation, as assignment does not.

  An int in a float field becomes a float, in place.

  Raises:
    ConfigError: a value of another type, a float that is not finite, or an attribute
      that is no field.
  """
  for at, node in _configs(config):
    hints = _hints(type(node))
    for name, value in getattr(node, '__dict__', {}).items():
      known = inspect.getattr_static(type(node), name, None)
      if name not in hints and not isinstance(known, functools.cached_property):
        raise _no_field(config, node, at, name, _join(at, name), value)
    for name, value in _children(node):
      try:
        fitted = _fit(value, hints[name])
      except ValueError:
        got, expected = type(value).__name__, _in_words(hints[name])
        if isinstance(value, float) and not math.isfinite(value):
          got = 'not finite'
        fix = f'assign {expected}'
        if isinstance(value, list):
          fix = 'write a tuple: (1, 2), and (1,) for one element'
        problem = f'{got} where {expected} is expected'
        raise ConfigError(_join(at, name), value, problem, fix) from None
      if fitted is not value:
        object.__setattr__(node, name, fitted)  # Frozen classes included.


def describe(config: Any) -> list[str]:
  """Returns a line for each field: its path, its value and what may be assigned."""
  return [
    f'{_join(at, name)}={_brief(getattr(node, name))}  {_in_words(hint)}'
    for at, node in _configs(config)
    for name, hint in _hints(type(node)).items()
  ]


def _no_field(config, node, at: str, name: str, path: str, value: Any) -> ConfigError:
  elsewhere = [_join(a, name) for a, c in _configs(config) if name in _hints(type(c))]
  fix = suggest(name, _hints(type(node)), elsewhere)
  where = f'config.{at} ({_class_path(type(node))})' if at else 'config'
  return ConfigError(path, value, f'no field {name!r} in {where}', fix)


def suggest(name: str, names: Iterable[str], otherwise: Iterable[str] = ()) -> str:
  """Returns the fix for a misspelt name: the nearest ones, `otherwise`, or all."""
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


def _value_hint(hint: Any) -> Any:
  """The annotation of a dict's values; Any if it is no dict's."""
  arms = typing.get_args(hint) if typing.get_origin(hint) in _UNION else (hint,)
  found = [typing.get_args(arm)[1] for arm in arms if typing.get_origin(arm) is dict]
  return found[0] if found else Any


def _fit(value: Any, hint: Any) -> Any:
  """Returns the value as the annotated type: itself, or a float for an int.

  Raises ValueError without a message if it is none.
  """
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in _UNION:
    found = []
    for arm in args:
      with contextlib.suppress(ValueError):
        found.append(_fit(value, arm))
    if not found:
      raise ValueError
    return next((fitted for fitted in found if fitted is value), found[0])
  if origin is tuple and isinstance(value, tuple):
    args = args[:1] * len(value) if args[-1:] == (...,) else args
    if len(args) != len(value):
      raise ValueError
    fitted = tuple(map(_fit, value, args))
    return value if all(map(operator.is_, fitted, value)) else fitted
  if origin is dict and isinstance(value, dict):
    fitted = {_fit(k, args[0]): _fit(v, args[1]) for k, v in value.items()}
    return value if all(map(operator.is_, fitted.values(), value.values())) else fitted
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value) if abs(value) <= sys.float_info.max else math.inf
  if origin is Literal:
    fits = any(value == arg and type(value) is type(arg) for arg in args)
  elif hint is int and isinstance(value, bool):
    fits = False
  else:
    try:
      fits = isinstance(value, origin or hint)
    except TypeError:  # Any, or a Protocol that cannot be checked.
      fits = True
  if not fits or (hint is float and not math.isfinite(value)):
    raise ValueError
  return value


def _parse(text: str, hint: Any) -> Any:
  """Reads a value of the annotated type; ValueError without a message if it is none."""
  words = {'none': None, 'true': True, 'false': False}
  if text.lower() in words:
    with contextlib.suppress(ValueError):
      return _fit(words[text.lower()], hint)
  for arm in typing.get_args(hint) if typing.get_origin(hint) in _UNION else (hint,):
    if tuple in (arm, typing.get_origin(arm)):
      return _parse_tuple(text.strip(), typing.get_args(arm) or (Any, ...))
  for kind in (int, float, str):
    with contextlib.suppress(ValueError):
      return _fit(kind(text), hint)
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


def _in_words(hint: Any) -> str:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in _UNION:
    return ' or '.join(map(_in_words, args))
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
      fix = suggest(name, _hints(cls)) + ' (or use the version that saved it)'
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
    fix = suggest(name, (k for k, v in vars(module).items() if _is_dataclass_type(v)))
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
