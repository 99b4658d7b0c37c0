"""The launch files: linted, of the right form, and what they do as training ends.

srun, scontrol, gcloud and python are stand-ins that note how they are called; SLURM's
real ones are in `slurm_test`.
"""

import json
import os
import re
import string
import subprocess
import sys
import sysconfig
from pathlib import Path

import jsonschema
import pytest
import yaml
from launch_schemas import JOBSET, SKY
from runs import ROOT

LAUNCH = ROOT / 'launch'
SCRIPTS = [LAUNCH / 'slurm.sbatch', LAUNCH / 'tpu.sh', ROOT / '.ci' / 'run']
YAMLS = [LAUNCH / 'jobset.yaml', LAUNCH / 'sky.yaml']
# As somebody would write them in a shell, and what train must get.
SHELL = (
  "--config=configs/quickstart.py:tiny --workdir='gs://bucket/a run' --config.steps=30"
)
ARGS = [
  '--config=configs/quickstart.py:tiny',
  '--workdir=gs://bucket/a run',
  '--config.steps=30',
]
TRAIN = ['-m', 'mtpjax.train', *ARGS]

# Notes its name and arguments as a line of JSON in $CALLS. Takes the next line of
# $ANSWERS/NAME, if there is one: its exit code, and what it prints.
STAND_IN = f"""#!{sys.executable} -SE
import json, os, pathlib, sys
name = pathlib.Path(sys.argv[0]).name
with open(os.environ['CALLS'], 'a') as file:
  file.write(json.dumps([name, *sys.argv[1:]]) + '\\n')
if name == 'gcloud':
  verb = sys.argv[4]
  if verb == 'scp':
    os.link(sys.argv[5], f"{{os.environ['ANSWERS']}}/copied-{{os.getpid()}}.tgz")
  command = next((a for a in sys.argv if a.startswith('--command=')), '')
  name = 'train' if 'exec' in command else verb
answers = pathlib.Path(os.environ['ANSWERS'], name)
if answers.exists():
  code, _, rest = answers.read_text().partition('\\n')
  answers.write_text(rest)
  if not code:
    sys.exit(f'{{name}} was called once too often')
  code, _, said = code.partition(' ')
  print(said)
  sys.exit(int(code))
"""


class Stage:
  """A folder with stand-ins first on the path."""

  def __init__(self, folder):
    self.folder, self.log = folder, folder / 'calls'
    self.bin, self.answers = folder / 'bin', folder / 'answers'
    self.bin.mkdir()
    self.answers.mkdir()
    self.log.touch()
    for name in ('srun', 'scontrol', 'gcloud', 'python', 'python3'):
      self.stand_in(self.bin / name)

  def stand_in(self, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STAND_IN)
    path.chmod(0o755)

  def answer(self, name, *lines):
    (self.answers / name).write_text(''.join(f'{line}\n' for line in lines))

  def run(self, *command, cwd=None, **env):
    given = {'CALLS': self.log, 'ANSWERS': self.answers, **env}
    base = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')}
    return subprocess.run(
      ['bash', *map(str, command)],
      env={
        **base,
        **{k: str(v) for k, v in given.items()},
        'PATH': f'{self.bin}:{os.environ["PATH"]}',
      },
      cwd=cwd or self.folder,
      capture_output=True,
      text=True,
      timeout=60,
    )

  def calls(self):
    return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def stage(tmp_path):
  return Stage(tmp_path)


def tool(name):
  return str(Path(sysconfig.get_path('scripts'), name))


def test_every_script_passes_shellcheck():
  found = {p for p in LAUNCH.iterdir() if p.suffix in ('.sh', '.sbatch')}
  assert found <= set(SCRIPTS)
  command = [tool('shellcheck'), *SCRIPTS]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout
  assert os.access(LAUNCH / 'tpu.sh', os.X_OK)


def test_every_yaml_passes_yamllint():
  assert {p for p in LAUNCH.iterdir() if p.suffix == '.yaml'} == set(YAMLS)
  rules = (
    '{extends: default, rules: {document-start: disable, '
    'line-length: {max: 88}, indentation: {indent-sequences: consistent}}}'
  )
  command = [tool('yamllint'), '--strict', '--config-data', rules, *map(str, YAMLS)]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def jobset(variant):
  """As the head of the file says to make it."""
  text = (LAUNCH / 'jobset.yaml').read_text()
  if variant == 'GPU':
    found = re.search(r"^# .*sed ('[^']*')", text, re.MULTILINE)
    assert found is not None
    done = subprocess.run(
      ['bash', '-c', f'sed {found[1]}'], input=text, capture_output=True, text=True
    )
    text = done.stdout
  values = {'NAME': 'run1', 'IMAGE': 'registry/mtpjax:1', 'QUEUE': 'team'}
  found = re.search(r"envsubst '([^']*)'", text)
  assert found is not None
  assert sorted(found[1].split()) == ['$ARGS', '$IMAGE', '$NAME', '$QUEUE']
  body = re.sub(r'(?m)^#.*\n', '', text)
  return yaml.safe_load(string.Template(body).safe_substitute(values, ARGS=SHELL))


def sky():
  return yaml.safe_load((LAUNCH / 'sky.yaml').read_text())


@pytest.mark.parametrize('variant', ['TPU', 'GPU'])
def test_the_jobset_is_one_and_restarts_but_for_mistakes(variant):
  found = jobset(variant)
  jsonschema.validate(found, JOBSET)
  assert found['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'team'
  spec = found['spec']
  assert spec['failurePolicy']['maxRestarts'] > 10
  [rule] = spec['failurePolicy']['rules']
  assert rule['action'] == 'FailJobSet'
  assert rule['onJobFailureReasons'] == ['PodFailurePolicy']
  [workers] = spec['replicatedJobs']
  job = workers['template']['spec']
  # A pod that fails must fail the job: alone it cannot come back to the others.
  assert job['backoffLimit'] == 0 and job['parallelism'] == job['completions'] > 1
  [policy] = job['podFailurePolicy']['rules']
  assert policy['action'] == 'FailJob' and policy['onExitCodes']['values'] == [2]
  [train] = job['template']['spec']['containers']
  assert policy['onExitCodes']['containerName'] == train['name']
  [chips] = train['resources']['limits']
  selector = job['template']['spec']['nodeSelector']
  if variant == 'TPU':
    assert chips == 'google.com/tpu'
    assert {x.rpartition('/')[2] for x in selector} == {
      'gke-tpu-accelerator',
      'gke-tpu-topology',
    }
    x, y = map(int, selector['cloud.google.com/gke-tpu-topology'].split('x'))
    assert x * y == job['parallelism'] * train['resources']['limits'][chips]
  else:
    assert chips == 'nvidia.com/gpu' and [*selector] == [
      'cloud.google.com/gke-accelerator'
    ]


def test_the_sky_task_is_one_and_recovers():
  found = sky()
  jsonschema.validate(found, SKY)
  assert found['envs']['ARGS'] is None  # SkyPilot then asks for it
  recovery = found['resources']['job_recovery']
  assert recovery['max_restarts_on_errors'] > 0
  assert recovery['recover_on_exit_codes'] == [143]


@pytest.mark.parametrize(
  ('make', 'schema', 'path', 'value'),
  [
    (sky, SKY, ('resources', 'use_sport'), True),
    (sky, SKY, ('resources', 'job_recovery', 'max_restarts_on_error'), 3),
    (sky, SKY, ('num_nodes',), 0),
    (sky, SKY, ('env',), {}),
    (jobset, JOBSET, ('apiVersion',), 'jobset.x-k8s.io/v1'),
    (jobset, JOBSET, ('metadata', 'name'), 'Run 1'),
    (jobset, JOBSET, ('spec', 'maxRestarts'), 3),
    (jobset, JOBSET, ('spec', 'failurePolicy', 'maxRestart'), 3),
    (jobset, JOBSET, ('spec', 'failurePolicy', 'rules', 0, 'action'), 'Fail'),
    (jobset, JOBSET, ('spec', 'replicatedJobs', 0, 'backoffLimit'), 0),
  ],
)
def test_the_forms_refuse_what_the_api_would_refuse(make, schema, path, value):
  found = make() if make is sky else make('TPU')
  *before, last = path
  place = found
  for key in before:
    place = place[key]
  place[last] = value
  with pytest.raises(jsonschema.ValidationError):
    jsonschema.validate(found, schema)


@pytest.mark.parametrize('variant', ['TPU', 'GPU'])
def test_the_jobset_runs_train_with_the_arguments(stage, variant):
  [workers] = jobset(variant)['spec']['replicatedJobs']
  job = workers['template']['spec']
  [train] = job['template']['spec']['containers']
  bash, *command = train['command']
  assert bash == 'bash'
  done = stage.run(*command, JOB_COMPLETION_INDEX=3)
  assert done.returncode == 0, done.stderr
  [call] = stage.calls()
  if variant == 'GPU':  # where JAX does not find the others by itself
    own, call[3:6] = call[3:6], []
    # JobSet's names: of the set, the replicated job, the job, the pod; and the network.
    assert own[1] == f'--coordinator=run1-{workers["name"]}-0-0.run1:9876'
    assert own[::2] == [f'--processes={job["parallelism"]}', '--process=3']
  assert call == ['python', *TRAIN]


@pytest.mark.parametrize('extra', ['cuda', 'tpu'])
def test_the_sky_task_installs_and_runs_train_with_the_arguments(stage, extra):
  task = sky()
  assert task['envs']['EXTRA'] == 'cuda'
  env = {'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2', 'SKYPILOT_NUM_NODES': 2}
  env = {**env, 'SKYPILOT_NODE_RANK': 1, 'ARGS': SHELL, 'EXTRA': extra}
  stage.stand_in(stage.folder / '.venv' / 'bin' / 'python')
  for script in (task['setup'], task['run']):
    done = stage.run('-c', script, **env)
    assert done.returncode == 0, done.stderr
  *setup, train = stage.calls()
  if extra == 'cuda':
    own, train[3:6] = train[3:6], []
    assert own == ['--coordinator=10.0.0.1:9876', '--processes=2', '--process=1']
  assert train == ['python', *TRAIN]
  assert setup[-1][-2:] == ['-e', f'.[{extra},gcs]']
  stage.answer('python', '143')
  assert stage.run('-c', task['run'], **env).returncode == 143


@pytest.mark.parametrize('code', [0, 2])
def test_slurm_ends_with_what_is_finished_or_a_mistake(stage, code):
  stage.answer('srun', code)
  done = stage.run(LAUNCH / 'slurm.sbatch', *ARGS, SLURM_JOB_ID=7)
  assert done.returncode == code
  [[srun, *call]] = stage.calls()
  assert srun == 'srun' and call[-len(TRAIN) - 1 :] == ['python', *TRAIN]


@pytest.mark.parametrize('code', [143, 1, 134, 137])
def test_slurm_queues_again_what_was_stopped(stage, code):
  stage.answer('srun', code)
  env = {'SLURM_JOB_ID': 7, 'SLURM_RESTART_COUNT': 99}
  done = stage.run(LAUNCH / 'slurm.sbatch', *ARGS, **env)
  assert done.returncode == 0 and f'code {code}' in done.stdout
  assert stage.calls()[1:] == [['scontrol', 'requeue', '7']]


def test_slurm_gives_up_some_time(stage):
  stage.answer('srun', 1)
  env = {'SLURM_JOB_ID': 7, 'SLURM_RESTART_COUNT': 3, 'MAX_RESTARTS': 3}
  done = stage.run(LAUNCH / 'slurm.sbatch', *ARGS, **env)
  assert done.returncode == 1 and 'giving up' in done.stderr
  assert [name for name, *_ in stage.calls()] == ['srun']


class Tpu:
  """tpu.sh in a checkout of its own: its calls of gcloud, by verb, without `list`."""

  def __init__(self, stage):
    self.stage = stage
    self.checkout = stage.folder / 'checkout'
    self.checkout.mkdir()
    for name in ('kept', 'edited', 'ignored', '.gitignore'):
      (self.checkout / name).write_text(name)
    for git in ('init --quiet', 'add kept'):
      subprocess.run(['git', *git.split()], cwd=self.checkout, check=True)

  def run(self, *args, **env):
    env = {'NAME': 'run1', 'ZONE': 'us-east5-b', 'TYPE': 'v6e-64', 'POLL': 0, **env}
    env = {name: value for name, value in env.items() if value is not None}
    return self.stage.run(LAUNCH / 'tpu.sh', *(args or ARGS), cwd=self.checkout, **env)

  def states(self, *states):
    lines = (s if s.startswith('1') else f'0 {s}' for s in states)
    self.stage.answer('list', *lines)

  def calls(self):
    found = []
    for gcloud, *call in self.stage.calls():
      assert gcloud == 'gcloud' and call[:3] == ['compute', 'tpus', 'queued-resources']
      assert '--zone=us-east5-b' in call and '--quiet' in call
      if call[3] != 'list':
        found.append(call[3:])
    return found

  def story(self):
    """What happened, in words; each training has its installation before it."""
    words = []
    for verb, *rest in self.calls():
      text = ' '.join(rest)
      if verb in ('ssh', 'scp'):
        assert {'--node=all', '--worker=all', '--batch-size=all'} <= set(rest)
        verb = next((w for w in ('pkill', 'uv', 'exec') if w in text), verb)
      words.append(verb)
    said = ' '.join(words)
    return said.replace('pkill scp uv', 'install').replace('exec', 'train')


@pytest.fixture
def tpu(stage):
  return Tpu(stage)


def test_a_pod_that_is_taken_away_is_asked_for_again_until_training_is_finished(tpu):
  tpu.states(
    *('', 'WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE'),
    *('SUSPENDING', 'SUSPENDED', '', 'ACTIVE'),
  )
  tpu.stage.answer('train', 255, 0)
  done = tpu.run()
  assert done.returncode == 0, done.stderr
  expected = 'create install train delete create install train delete'
  assert tpu.story() == expected
  create, *_, delete = tpu.calls()
  assert set(create) >= {
    *('run1', '--node-id=run1', '--spot'),
    *('--accelerator-type=v6e-64', '--runtime-version=v2-alpha-tpuv6e'),
  }
  assert 'run1' in delete and '--force' in delete


@pytest.mark.parametrize('code', [143, 1])
def test_on_a_pod_that_stays_training_goes_on(tpu, code):
  tpu.states('ACTIVE', 'ACTIVE')  # found there, as after a restart of the script
  tpu.stage.answer('train', code, 0)
  done = tpu.run()
  assert done.returncode == 0 and f'code {code}' in done.stdout
  assert tpu.story() == 'install train install train delete'


def test_a_mistake_gives_the_pod_back_and_ends(tpu):
  tpu.states('ACTIVE')
  tpu.stage.answer('train', 2)
  assert tpu.run().returncode == 2
  assert tpu.story() == 'install train delete'


def test_a_request_that_failed_is_made_anew(tpu):
  tpu.states('', 'FAILED', '', 'ACTIVE')
  tpu.stage.answer('train', 0)
  assert tpu.run().returncode == 0
  assert tpu.story() == 'create delete create install train delete'


def test_when_gcloud_fails_nothing_is_created_or_deleted(tpu):
  tpu.states('ACTIVE', '1', '1', 'ACTIVE')
  tpu.stage.answer('train', 255, 0)
  assert tpu.run().returncode == 0
  assert tpu.story() == 'install train install train delete'


def test_when_installing_fails_training_waits(tpu):
  tpu.states('ACTIVE', 'ACTIVE')
  tpu.stage.answer('scp', 1, 0)
  tpu.stage.answer('train', 0)
  assert tpu.run().returncode == 0
  assert tpu.story() == 'pkill scp install train delete'


def test_a_first_request_that_is_refused_ends_the_script_a_later_one_does_not(tpu):
  tpu.states('')
  tpu.stage.answer('create', 1)
  done = tpu.run()
  assert done.returncode == 2 and 'gcloud cannot create run1' in done.stderr
  tpu.states('', 'SUSPENDED', '', '', 'ACTIVE')
  tpu.stage.answer('create', 0, 1, 0)
  tpu.stage.answer('train', 0)
  assert tpu.run().returncode == 0


def test_slices_and_tiers(tpu):
  tpu.states('', 'ACTIVE')
  tpu.stage.answer('train', 0)
  tpu.run(SLICES=2, TIER='', TYPE='v5p-256')
  create = tpu.calls()[0]
  assert {'--node-count=2', '--node-prefix=run1'} < set(create)
  assert '--runtime-version=v2-alpha-tpuv5' in create
  assert not any(x in ('--spot', '') or x.startswith('--node-id') for x in create)


@pytest.mark.parametrize(
  ('args', 'env', 'said'),
  [
    ((), {'NAME': None}, 'NAME is not set'),
    ((), {'ZONE': ''}, 'ZONE is not set'),
    (('--config=a.py', '--workdir=runs/x'), {}, '--workdir must be a bucket'),
    (('--config=a.py',), {}, '--workdir must be a bucket'),
    ((), {'TYPE': 'v9-8'}, 'TYPE=v9-8'),
  ],
)
def test_what_cannot_work_is_said_before_anything_is_asked_for(tpu, args, env, said):
  done = tpu.run(*args, **env)
  assert done.returncode != 0 and said in done.stderr
  assert not tpu.stage.calls()


def test_a_pod_gets_the_checkout_and_runs_train_with_the_arguments(tpu):
  (tpu.checkout / '.gitignore').write_text('ignored\n')
  tpu.states('ACTIVE')
  tpu.stage.answer('train', 0)
  assert tpu.run().returncode == 0
  [copied] = tpu.stage.answers.glob('copied-*')
  names = subprocess.run(['tar', '-tzf', copied], capture_output=True, text=True).stdout
  assert sorted(names.split()) == ['.gitignore', 'edited', 'kept']
  [command] = [
    x.removeprefix('--command=')
    for _, *rest in tpu.calls()
    for x in rest
    if x.startswith('--command=') and 'exec' in x
  ]
  tpu.stage.stand_in(tpu.stage.folder / 'mtpjax' / '.venv' / 'bin' / 'python')
  tpu.stage.log.write_text('')
  assert tpu.stage.run('-c', command).returncode == 0
  assert tpu.stage.calls() == [['python', *TRAIN]]


def test_train_takes_what_the_launch_files_give_it():
  """The arguments that the tests above see arrive, into the real parser."""
  program = (
    'import sys; from mtpjax import flags, train\n'
    'def main(config): print(config.steps, flags.flags.FLAGS.workdir)\n'
    'flags.run(main, argv=["train", *sys.argv[1:]])'
  )
  done = subprocess.run(
    [sys.executable, '-c', program, *ARGS],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.stdout.strip() == '30 gs://bucket/a run', done.stderr
