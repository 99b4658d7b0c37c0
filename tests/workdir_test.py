"""A run's directory: claimed once, taken again by the same run only."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

from mtpjax import config as configs
from mtpjax import fields, mesh, processes, schedules, workdir
from mtpjax.checkpoint import CheckpointError
from mtpjax.data import batches, sources
from mtpjax.data.tokenizer import Bytes, Characters
from mtpjax.drafters import parallel, sequential
from mtpjax.models import trunk


@pytest.fixture(autouse=True)
def _mesh():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


def settings(**changes):
  config = configs.Config(
    data=batches.Config(source=sources.Stdlib(files=3), length=16, batch=8),
    trunk=trunk.Config(width=16, layers=1, heads=2),
    drafter=sequential.Config(depth=2),
  )
  return configs.finalize(dataclasses.replace(config, **changes), 256)


def test_a_new_directory_is_made_with_its_parents_and_holds_the_resolved_config(
  tmp_path,
):
  config = settings()
  run = workdir.claim(str(tmp_path / 'a' / 'b'), config)
  path = run.files
  assert str(run) == str(run.path) == str(path)
  assert path == tmp_path / 'a' / 'b'
  assert {file.name for file in path.iterdir()} == {'.lock', 'config.json'}
  saved = json.loads((path / 'config.json').read_text())
  assert saved['trunk']['vocab'] == 256  # of the tokenizer
  assert saved['trunk']['ffn'] == config.trunk.ffn == 64
  assert fields.from_json(saved) == config


def test_the_same_config_goes_on_and_so_does_one_that_learns_the_same(tmp_path):
  workdir.claim(str(tmp_path), settings())
  workdir.claim(str(tmp_path), settings())
  changed = settings(name='other', log_every=7, mesh=mesh.Config(fsdp=1, tensor=-1))
  changed.checkpoint.every, changed.checkpoint.keep = 9, 1
  workdir.claim(str(tmp_path), changed)
  saved = json.loads((tmp_path / 'config.json').read_text())
  assert fields.from_json(saved) == changed  # what goes on is what it now says


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'steps': 999}, ['steps: 1000 → 999']),
    ({'seed': 1}, ['seed: 0 → 1']),
    ({'freeze_trunk': True}, ['freeze_trunk: False → True']),
    ({'drafter': None}, ['drafter: mtpjax.drafters.sequential:Config → None']),
    (
      {'drafter': parallel.Config(depth=2)},
      ['drafter: mtpjax.drafters.sequential:Config → mtpjax.drafters.parallel:Config'],
    ),
    (
      {'drafter': sequential.Config(depth=3, weight=schedules.Constant(0.5))},
      ['drafter.depth: 2 → 3', 'drafter.weight'],
    ),
    (
      {'data': batches.Config(source=sources.Text(files=('*',)), length=16, batch=8)},
      ['data.source: mtpjax.data.sources:Stdlib → mtpjax.data.sources:Text'],
    ),
  ],
)
def test_another_config_is_refused_naming_what_differs(tmp_path, changes, said):
  workdir.claim(str(tmp_path), settings())
  before = (tmp_path / 'config.json').read_bytes()
  with pytest.raises(workdir.WorkdirError) as caught:
    workdir.claim(str(tmp_path), settings(**changes))
  for text in (*said, str(tmp_path), 'use another directory'):
    assert text in str(caught.value)
  assert (tmp_path / 'config.json').read_bytes() == before


def test_a_directory_goes_on_with_another_kernel_and_mesh(tmp_path):
  workdir.claim(str(tmp_path), settings())
  other = settings()
  other.trunk.attention, other.mesh.tensor = 'xla', 2
  workdir.claim(str(tmp_path), other)
  other.trunk.rope_theta = 5.0
  with pytest.raises(workdir.WorkdirError, match=r'config \(trunk.rope_theta: [^;]*\)'):
    workdir.claim(str(tmp_path), other)


def test_many_differences_are_named_in_part(tmp_path):
  workdir.claim(str(tmp_path), settings())
  other = settings(steps=1, seed=2, freeze_trunk=True)
  other.trunk.width, other.trunk.layers, other.loss.z_loss = 32, 3, 0.1
  with pytest.raises(workdir.WorkdirError, match=r'steps: 1000 → 1; .*; …\)'):
    workdir.claim(str(tmp_path), other)


@pytest.mark.parametrize(
  ('name', 'contents'),
  [
    ('notes.txt', b'mine'),
    ('.hidden', b''),
    ('config.json', b'[]'),
    ('config.json', b'{"architectures": ["MiMoForCausalLM"]}'),
    ('config.json', b'\xff\xfe binary'),
    ('config.json', b'{"class": "mtpjax.config:Config", "na'),
  ],
)
def test_somebody_elses_directory_is_refused_and_left_as_it_is(
  tmp_path, name, contents
):
  (tmp_path / name).write_bytes(contents)
  with pytest.raises(workdir.WorkdirError) as caught:
    workdir.claim(str(tmp_path), settings())
  assert str(tmp_path) in str(caught.value)
  assert 'directory' in str(caught.value).partition(';')[2]
  assert [file.name for file in tmp_path.iterdir()] == [name]
  assert (tmp_path / name).read_bytes() == contents


def test_a_directory_that_a_kill_left_before_its_first_file_was_whole_is_ours(tmp_path):
  (tmp_path / 'config.json.part-123').write_text('{"class": ')
  workdir.claim(str(tmp_path), settings())
  assert (tmp_path / 'config.json').exists()


@pytest.mark.parametrize('below', ['file', 'file/run', 'file/a/run'])
def test_a_directory_that_cannot_be_written_is_an_error_that_names_it(tmp_path, below):
  (tmp_path / 'file').write_text('')
  with pytest.raises(workdir.WorkdirError) as caught:
    workdir.claim(str(tmp_path / below), settings())
  assert f'--workdir={tmp_path / below} cannot be used' in str(caught.value)
  assert 'choose another directory' in str(caught.value)


def test_a_checkpoint_carries_what_is_needed_to_run_it_elsewhere():
  config, tokenizer = settings(), Bytes()
  saved = json.loads(json.dumps(workdir.metadata(config, tokenizer)))
  assert fields.from_json(saved['config']) == config
  assert saved['tokenizer'] == tokenizer.to_json()
  assert saved['tokenizer_fingerprint'] == tokenizer.fingerprint
  assert saved['vocabulary'] == {'tokens': 256, 'padded': 256}
  drafter = saved['conventions']
  for field in dataclasses.fields(sequential.Config):
    if field.name not in ('weight', 'rho', 'curriculum'):  # of the loss alone
      assert drafter[field.name] == json.loads(
        json.dumps(getattr(config.drafter, field.name))
      )
  assert drafter['kind'] == 'sequential'
  assert drafter['modules'] == 1
  assert drafter['shared'] == ['embedding', 'head', 'module']


def test_a_checkpoint_of_another_tokenizer_is_refused():
  ours, other = Characters('ab'), Characters('ac')
  saved = json.loads(json.dumps(workdir.metadata(settings(), ours)))
  workdir.check_tokenizer(saved, Characters('ab'))
  match = r'another tokenizer .*"ab".* than this .*"ac"'
  with pytest.raises(CheckpointError, match=match):
    workdir.check_tokenizer(saved, other)


def test_a_directory_in_use_by_another_process_is_refused(tmp_path):
  program = (
    'import fcntl, sys; file = open(sys.argv[1], "w"); '
    'fcntl.lockf(file, fcntl.LOCK_EX); print("held", flush=True); sys.stdin.read()'
  )
  other = subprocess.Popen(
    [sys.executable, '-c', program, str(tmp_path / '.lock')],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert other.stdin is not None and other.stdout is not None
  assert other.stdout.readline() == 'held\n'
  with pytest.raises(workdir.WorkdirError, match='in use by another training'):
    workdir.claim(str(tmp_path), settings())
  other.communicate('')
  workdir.claim(str(tmp_path), settings())


def test_other_processes_follow_the_first_into_its_directory_alone(
  tmp_path, monkeypatch
):
  told = []
  monkeypatch.setattr(processes, 'agreed', lambda value: told.append(value) or told[-1])
  workdir.claim(str(tmp_path / 'ours'), settings())
  workdir.claim(str(tmp_path / 'of another machine'), settings())
  ours, _ = told
  monkeypatch.setattr(processes, 'agreed', lambda value: ours)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(workdir, '_LATE', 0)
  run = workdir.claim(str(tmp_path / 'ours'), settings())
  assert run.path == tmp_path / 'ours'
  differs = r'process 1 has another config than process 0 \(steps: 1000 → 9\)'
  with pytest.raises(workdir.WorkdirError, match=differs):
    workdir.claim(str(tmp_path / 'ours'), settings(steps=9))
  for name in ('of another machine', 'not there'):
    with pytest.raises(workdir.WorkdirError, match='is not that of process 0'):
      workdir.claim(str(tmp_path / name), settings())
  assert not (tmp_path / 'not there').exists()
