"""Commands of several processes: joining, agreeing, ending together."""

import copy
import random
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from absl import flags
from runs import ROOT, assert_mistake, environment, finished, free_port, joined

from mtpjax import mesh, processes, step
from mtpjax.data import batches, pack
from mtpjax.fields import ConfigError

DEMO = """'''A demo.'''
import os, signal, time
from absl import flags as absl_flags
from mtpjax import fields, flags, processes

processes.define_flags()
absl_flags.adopt_module_key_flags(processes)
MODE = absl_flags.DEFINE_string('mode', '', 'MODE:PROCESS')
absl_flags.DEFINE_string('other', None, 'anything')


def main():
  import jax

  index, (mode, _, who) = jax.process_index(), MODE.value.partition(':')
  said = processes.agreed(['first', index]), processes.anywhere(index == 1)
  print(jax.process_count(), *said, processes.anywhere(False), flush=True)
  if mode == 'end':
    return 3
  if mode == 'hang':
    with processes.Watch(1.0) as watch:
      list(watch.over(range(3), 'item'))
      watch.at('saving step 7') if who == str(index) else watch.at(None)
      time.sleep(60)
  if who == str(index):
    print('now', time.monotonic(), flush=True)
  if (mode, who) == ('mistake', str(index)):
    raise fields.ConfigError('steps', 0, 'is bad', 'mend it')
  if (mode, who) == ('bug', str(index)):
    raise KeyError('a real bug')
  if (mode, who) == ('kill', str(index)):
    os.kill(os.getpid(), signal.SIGKILL)
  time.sleep(60) if index else processes.anywhere(True)


if __name__ == '__main__':
  flags.run(main, takes_config=False, within=processes.together)
"""


@pytest.fixture(scope='module')
def demo(tmp_path_factory):
  folder = tmp_path_factory.mktemp('demo')
  (folder / 'demo.py').write_text(DEMO)

  def start(*args, **env):
    return subprocess.Popen(
      [sys.executable, folder / 'demo.py', *args],
      env={**environment(folder, **env), 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  return start


def seconds_since(done):
  """From the line `now` to here."""
  said = re.search(r'^now (.*)$', ''.join(x.stdout for x in done), re.MULTILINE)
  assert said
  return time.monotonic() - float(said[1])


def two(demo, mode):
  port = free_port()
  return finished([demo(*joined(i, 2, port), f'--mode={mode}') for i in range(2)])


def test_two_processes_join_agree_and_end_together(demo):
  for done in two(demo, 'end'):
    assert (done.returncode, done.stderr) == (3, '')
    assert done.stdout == "2 ['first', 0] True False\n"


@pytest.mark.parametrize('who', [0, 1])
def test_a_mistake_of_one_ends_the_other_which_says_so(demo, who):
  done = two(demo, f'mistake:{who}')
  assert_mistake(done[who], 'steps = 0: is bad; mend it')
  assert_mistake(done[1 - who], f'process {who} of 2 ended: steps = 0: is bad')
  assert seconds_since(done) < 10


@pytest.mark.parametrize('who', [0, 1])
def test_another_command_than_that_of_process_0_is_refused(demo, who):
  port = free_port()
  other = {who: ['--other=x']}
  done = finished([demo(*joined(i, 2, port), *other.get(i, ())) for i in range(2)])
  said = ("--other = None: is 'x'", "--other = 'x': is None")[who]
  assert_mistake(
    done[1], f'{said} in process 0 of this job; give all processes the same'
  )
  assert_mistake(done[0], f'process 1 of 2 ended: {said}')


@pytest.mark.slow
@pytest.mark.parametrize('who', [0, 1])
def test_so_does_a_bug(demo, who):
  done = two(demo, f'bug:{who}')
  assert [x.returncode for x in done] == [1, 1]
  assert 'Traceback' in done[who].stderr and 'a real bug' in done[who].stderr
  assert f"process {who} of 2 ended: KeyError: 'a real bug'" in done[1 - who].stderr
  assert 'Traceback' not in done[1 - who].stderr
  assert seconds_since(done) < 10


@pytest.mark.slow
@pytest.mark.parametrize('who', [0, 1])
def test_a_killed_process_is_noticed_in_15_seconds(demo, who):
  done = two(demo, f'kill:{who}')
  assert done[1 - who].returncode not in (0, None)
  assert re.search(r'another task died|is gone', done[1 - who].stderr)
  assert seconds_since(done) < 15


@pytest.mark.parametrize('who', [1])
def test_what_hangs_is_ended_with_its_stacks_and_the_others_say_so(demo, who):
  done = two(demo, f'hang:{who}')
  assert [x.returncode for x in done] == [1, 1]
  said = 'saving step 7 has taken more than guard.stuck=1 s'
  assert f'error: {said}' in done[who].stderr
  assert re.search(r'File .*demo.py", line \d+ in main', done[who].stderr)
  assert f'process {who} of 2 ended: {said}' in done[1 - who].stderr
  assert 'demo.py' not in done[1 - who].stderr


def test_who_never_arrives_is_waited_for_only_so_long(demo):
  ports = free_port(), free_port()
  started = [
    demo(*joined(i, 2, port), '--join_timeout=2') for i, port in enumerate(ports)
  ]
  done = finished(started)
  for port, one in zip(ports, done, strict=True):
    assert one.returncode == 1  # so that a launcher tries again
    assert f'127.0.0.1:{port} did not bring' in one.stderr
    assert '--join_timeout=2 s' in one.stderr
    assert 'Traceback' not in one.stderr


def test_once_all_is_saved_sigterm_ends_with_143_at_once():
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
  try:
    stop = processes.Stop()
    stop.obey_at_once()
    with pytest.raises(SystemExit) as ended:
      signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    # What comes while the last step is saved is not forgotten.
    for number in before:
      stop = processes.Stop()
      signal.raise_signal(number)
      assert stop.asked({}) == number  # noted, while training
      with pytest.raises(SystemExit) as ended:
        stop.obey_at_once()
      assert ended.value.code == 128 + number
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def test_alone_nothing_is_started(demo):
  [done] = finished([demo('--mode=end')])
  assert (done.returncode, done.stdout) == (3, "1 ['first', 0] False False\n")
  assert done.stderr == ''


SLURM = {
  'SLURM_JOB_ID': '7',
  'SLURM_STEP_NODELIST': 'node[3-4]',
  'SLURM_NTASKS': '2',
  'SLURM_PROCID': '1',
  'SLURM_LOCALID': '0',
}
MPI = {
  'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1:34911',
  'OMPI_COMM_WORLD_SIZE': '4',
  'OMPI_COMM_WORLD_RANK': '3',
  'OMPI_COMM_WORLD_LOCAL_RANK': '1',
}
POD = {'KUBERNETES_SERVICE_HOST': '10.0.0.1'}


@pytest.fixture
def joining(monkeypatch):
  """An environment with these variables, and what JAX was told to join."""
  found = []
  monkeypatch.setattr(
    jax.distributed, 'initialize', lambda **given: found.append(given)
  )

  def make(env, *args):
    for name, value in env.items():
      monkeypatch.setenv(name, value)
    processes.define_flags()
    values = flags.FlagValues()
    for name in ('coordinator', 'processes', 'process', 'join_timeout'):
      values[name] = copy.deepcopy(flags.FLAGS[name])
    values(['test', *args])
    monkeypatch.setattr(flags, 'FLAGS', values)
    return processes._join(), found

  return make


@pytest.mark.parametrize(
  'env',
  [{}, {**SLURM, 'SLURM_NTASKS': '1'}, {**MPI, 'OMPI_COMM_WORLD_SIZE': '1'}, POD],
)
def test_a_single_process_joins_nothing(joining, env):
  assert joining(env) == (False, [])


@pytest.mark.parametrize(
  ('env', 'devices'),
  [
    (SLURM, None),
    # One process a node takes all its devices; JAX alone takes the first.
    ({**SLURM, 'SLURM_STEP_NUM_TASKS': '2', 'SLURM_STEP_NUM_NODES': '2'}, []),
    ({**SLURM, 'SLURM_STEP_NUM_TASKS': '2', 'SLURM_STEP_NUM_NODES': '1'}, None),
    ({**SLURM, 'CUDA_VISIBLE_DEVICES': '3'}, []),
    ({**SLURM, 'CUDA_VISIBLE_DEVICES': '2,3'}, None),
    (MPI, None),
    ({**MPI, 'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}, []),
  ],
)
def test_what_a_launcher_says_is_left_to_jax(joining, env, devices):
  joins, [given] = joining(env)
  assert joins
  assert given['local_device_ids'] == devices
  assert 'coordinator_address' not in given


def test_what_is_said_by_hand_counts_more_than_a_launcher(joining):
  joins, [given] = joining(SLURM, '--coordinator=h:1', '--processes=3', '--process=2')
  assert joins
  assert given['coordinator_address'] == 'h:1'
  assert (given['num_processes'], given['process_id']) == (3, 2)
  assert given['cluster_detection_method'] == 'deactivate'
  assert joining(SLURM, '--coordinator=h:1', '--processes=1', '--process=0')[0] is False


def test_a_job_that_cannot_be_found_out_is_an_error(joining, monkeypatch):
  monkeypatch.setitem(sys.modules, 'kubernetes', None)
  with pytest.raises(ConfigError, match='K8sCluster cannot be found out'):
    joining({**POD, 'JOB_COMPLETION_INDEX': '0'})


@pytest.mark.parametrize(
  ('args', 'said'),
  [
    (['--processes=2', '--process=0'], '--coordinator = None: is missing'),
    (['--coordinator=h:1', '--process=0'], '--processes = None: is missing'),
    (joined(2, 2, 1), '--process = 2: is not one of 2'),
    (joined(0, 0, 1), '--processes = 0'),
    (['--coordinator=host', '--processes=2', '--process=0'], 'is no address'),
    (joined(0, 2, 0), 'is no address'),
    (joined(1, 2, 65536), 'is no address'),
  ],
)
def test_flags_that_do_not_fit_are_refused(joining, args, said):
  with pytest.raises(ConfigError, match=said):
    joining({}, *args)


def test_nobody_waits_for_less_than_a_second(joining):
  with pytest.raises(flags.IllegalFlagValueError, match='join_timeout=0'):
    joining({}, *joined(0, 2, 1), '--join_timeout=0')


def test_a_port_in_use_is_refused(joining):
  with socket.create_server(('', 0)) as server:
    port = server.getsockname()[1]
    with pytest.raises(ConfigError, match='cannot be listened at'):
      joining({}, *joined(0, 2, port))
    assert joining({}, *joined(1, 2, port))[0]


def assignments():
  """Meshes, and ways to deal their devices to processes, at random among them."""
  rng = random.Random(0)
  for sizes in ((8, 1, 1), (2, 4, 1), (2, 1, 4), (1, 2, 4)):
    for count in (2, 4):
      for shuffled in (False, True):
        order = rng.sample(range(8), 8) if shuffled else list(range(8))
        yield sizes, np.split(np.array(order), count)


def test_every_device_gets_its_part_of_the_same_global_batch():
  """Against a plain slice of the batch that one process has."""
  batch, shards, T = 16, 4, 8
  tokens = [np.arange(i * T, (i + 1) * T) for i in range(50)]
  plan = pack.pack(pack.concatenate(tokens, 500), T, 0)

  def train(own=None):
    return batches.TrainBatches(plan, batch=batch, shards=shards, seed=5, own=own)

  plain = train()
  whole = [next(plain) for _ in range(2)]
  heldout = list(batches.heldout_batches(plan, batch))
  for (fsdp, tensor, context), parts in assignments():
    sizes = mesh.Config(fsdp=fsdp, tensor=tensor, context=context)
    used = mesh.make(sizes)
    with jax.set_mesh(used):
      sharding = jax.NamedSharding(used, mesh.ids_BT)
      places = sharding.devices_indices_map((batch, T))
      devices = used.devices.reshape(-1)
      for part in parts:
        own = [devices[i] for i in part]
        held = step.rows_held(batch, own)
        # No row too many.
        wanted = {r for d in own for r in range(batch)[places[d][0]]}
        assert held.tolist() == sorted(wanted)
        rows = train(held)
        taken = [next(rows) for _ in range(2)]
        taken += list(batches.heldout_batches(plan, batch, held))
        for local, full in zip(taken, whole + heldout, strict=True):
          for name, x in local.items():
            for device in own:
              found = step.part_held(x, held, places[device])
              np.testing.assert_array_equal(found, full[name][places[device]])
        assert rows.get_state() == plain.get_state()


def test_put_makes_the_global_batch_from_what_is_held():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=2, tensor=2, context=2))):
    x = np.arange(64).reshape(8, 8)
    found = step.put({'x': x}, 8)['x']
    np.testing.assert_array_equal(found, x)
    assert found.sharding.spec == mesh.ids_BT
    assert step.put({'x': x})['x'].sharding == found.sharding
