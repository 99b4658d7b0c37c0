"""Commands in forks of one process that has imported what they import: for many that
is half the time. JAX starts its devices and threads in the fork, none before.

Run as a program, it reads a request a line, JSON, and answers with a return code each.
"""

import importlib
import json
import os
import pkgutil
import runpy
import select
import subprocess
import sys
from importlib import metadata

# Without its own emitters XLA compiles in half the time; jax 0.12 has no such choice.
OLDER = tuple(map(int, metadata.version('jaxlib').split('.')[:2])) < (0, 11)
FLAGS = '--xla_cpu_use_fusion_emitters=false' if OLDER else ''

COMMANDS = tuple(
  f'mtpjax.{name}' for name in ('train', 'evaluate', 'sample', 'bench', 'data.prepare')
)


class Forks:
  """Starts `python -m MODULE` as `subprocess.run` would.

  Args:
    env: of all that will be started: what JAX reads of it as it is imported is kept.
    folder: for what they say.
  """

  def __init__(self, env, folder):
    self._folder, self._count = folder, 0
    pipe = subprocess.PIPE
    self._server = subprocess.Popen(
      [sys.executable, __file__], env=env, stdin=pipe, stdout=pipe, text=True
    )

  def run(self, module, args, env, cwd, timeout=300):
    self._count += 1
    said = [self._folder / f'{self._count}.{name}' for name in ('out', 'err')]
    request = [module, [str(x) for x in args], env, str(cwd), [str(x) for x in said]]
    assert self._server.stdin is not None and self._server.stdout is not None
    self._server.stdin.write(json.dumps(request) + '\n')
    self._server.stdin.flush()
    if not select.select([self._server.stdout], [], [], timeout)[0]:
      self._server.kill()
      raise subprocess.TimeoutExpired(args, timeout, said[0].read_text())
    code = int(self._server.stdout.readline())
    return subprocess.CompletedProcess(args, code, *(x.read_text() for x in said))

  def close(self):
    assert self._server.stdin is not None and self._server.stdout is not None
    self._server.stdin.close()
    self._server.wait()
    self._server.stdout.close()


def serve():
  """Returns in every fork, with its request."""
  import mtpjax

  for module in pkgutil.walk_packages(mtpjax.__path__, 'mtpjax.'):
    if module.name not in COMMANDS:  # they are to be imported as `__main__`
      importlib.import_module(module.name)
  for line in sys.stdin:
    fork = os.fork()
    if not fork:
      return json.loads(line)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
  sys.exit()


if __name__ == '__main__':
  module, args, env, cwd, said = serve()
  for name in {*env, *os.environ}:
    if name.startswith('JAX_'):
      assert env.get(name) == os.environ.get(name), f'{name} was read already'
  os.environ.clear()
  os.environ.update(env)
  os.chdir(cwd)
  sys.path[0], sys.argv = cwd, [module, *args]
  for path, number in zip(('/dev/null', *said), range(3), strict=True):
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, number)
    os.close(file)
  runpy.run_module(module, run_name='__main__', alter_sys=True)
