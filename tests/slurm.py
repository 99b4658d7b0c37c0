"""A SLURM cluster of one node, on this machine, without root and without installing it:
Debian's packages are unpacked where the tests write, unless SLURM is installed."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

PACKAGES = (
  *('slurmctld', 'slurmd', 'slurm-client', 'slurm-wlm-basic-plugins'),
  'libhwloc15',
)

# No munge, no cgroups: one user, who trusts everybody on this machine.
CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_min_interval=100000,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=20
NodeName=localhost CPUs=4 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE
"""


class Slurm:
  """A cluster that runs; `sbatch` and the like."""

  def __init__(self, folder):
    self.folder = folder
    root, plugins = _find(folder)
    programs = [root / 'usr' / name for name in ('sbin', 'bin')]
    libraries = [plugins, plugins.parent]
    self.env = {
      **{k: v for k, v in os.environ.items() if not k.startswith('SLURM')},
      'SLURM_CONF': str(folder / 'slurm.conf'),
      'PATH': ':'.join([*map(str, programs), os.environ['PATH']]),
      'LD_LIBRARY_PATH': ':'.join(map(str, libraries)),
    }
    (folder / 'state').mkdir()
    (folder / 'spool').mkdir()
    (folder / 'slurm.conf').write_text(
      CONF.format(
        folder=folder, plugins=plugins, user=getpass.getuser(), ports=_free_ports()
      )
    )
    step = next((root / 'usr' / 'sbin').glob('slurmstepd*'))
    self._daemons = [
      self._start('slurmctld', '-D', '-c'),
      self._start('slurmd', '-D', '-c', '-N', 'localhost', '-d', step),
    ]
    self.until(lambda: 'idle' in self('sinfo', '--noheader', '--format=%T'), 30)

  def _start(self, name, *args):
    program = self._which(f'{name}-wlm') or self._which(name)
    assert program is not None
    with (self.folder / f'{name}.out').open('w') as output:
      return subprocess.Popen(
        [program, *map(str, args)], env=self.env, stdout=output, stderr=output
      )

  def _which(self, name):
    return shutil.which(name, path=self.env['PATH'])

  def __call__(self, *command, env=None):
    done = subprocess.run(
      [str(x) for x in command],
      env={**self.env, **(env or {})},
      cwd=self.folder,
      capture_output=True,
      text=True,
      timeout=60,
    )
    return done.stdout + done.stderr

  def until(self, what, seconds):
    """Waits until it is so; what SLURM says is shown if it takes too long."""
    end = time.monotonic() + seconds
    while not (found := what()):
      if time.monotonic() > end:
        logs = [p.read_text()[-3000:] for p in sorted(self.folder.glob('*.[lo]*'))]
        pytest.fail('\n'.join([f'not within {seconds} s', *logs]))
      time.sleep(0.1)
    return found

  def job(self, number):
    """What SLURM says of it, by name."""
    text = self('scontrol', 'show', 'job', number)
    return dict(x.split('=', 1) for x in text.split() if '=' in x)

  def close(self):
    self('scancel', '--user', getpass.getuser())
    gone = lambda: not self('squeue', '--noheader').strip()  # noqa: E731
    with contextlib.suppress(pytest.fail.Exception):
      self.until(gone, 40)  # or their shepherds stay behind
    for daemon in self._daemons[::-1]:
      daemon.terminate()
    for daemon in self._daemons:
      with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(10)
      daemon.kill()
      daemon.wait()


def _find(folder):
  """The root of its files, and its plugins."""
  installed = sorted(Path('/usr/lib').glob('*/slurm-wlm'))
  if installed and shutil.which('slurmctld', path='/usr/sbin:/usr/bin'):
    return Path('/'), installed[0]
  if shutil.which('apt-get') is None:
    pytest.fail('needs SLURM: install it (slurmctld), or run on Debian or Ubuntu')
  packages = folder / 'packages'
  packages.mkdir()
  command = ['apt-get', 'download', *PACKAGES]
  done = subprocess.run(command, cwd=packages, capture_output=True, text=True)
  if done.returncode:
    said = done.stderr.strip().splitlines()[-1:]
    pytest.fail(f'needs SLURM, and `{" ".join(command)}` fails: {said}')
  for package in packages.glob('*.deb'):
    subprocess.run(['dpkg', '-x', package, folder / 'root'], check=True)
  [plugins] = (folder / 'root').glob('usr/lib/*/slurm-wlm')
  return folder / 'root', plugins


def _free_ports():
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
    for one in sockets:
      one.bind(('127.0.0.1', 0))
    return [one.getsockname()[1] for one in sockets]
