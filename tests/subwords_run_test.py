"""A run of subwords: its tokenizer stays with it, and its texts end."""

import functools
import json

import pytest

pytestmark = pytest.mark.slow

CONFIG = """
from mtpjax import checkpoint, config, optimizers, schedules
from mtpjax.data import batches, records, subwords
from mtpjax.drafters import sequential
from mtpjax.models import trunk


def get_config(arg: str = ''):
  return config.Config(
    steps=40,
    data=batches.Config(
      source=records.Records(
        files=('FOLDER/*.jsonl',), prompt='question', response='answer', heldout=0.2
      ),
      tokenizer=subwords.Bpe.Config(vocab=280),
      length=32,
      batch=8,
    ),
    trunk=trunk.Config(width=32, layers=1, heads=2, ffn=64, remat='none'),
    drafter=sequential.Config(depth=1),
    optimizer=optimizers.AdamW(rate=schedules.WarmupCosine(peak=2e-2, warmup=0)),
    checkpoint=checkpoint.Config(every=20),
  )
"""


def _write(folder, answer):
  lines = [
    json.dumps({'question': f'{n}: что там? ', 'answer': answer}) for n in range(200)
  ]
  (folder / 'a.jsonl').write_text('\n'.join(lines))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('subwords')


@pytest.fixture(scope='module')
def command(folder, start):
  _write(folder, 'море!')
  (folder / 'small.py').write_text(CONFIG.replace('FOLDER', str(folder)))
  run = functools.partial(start, cwd=folder)
  done = run('train', f'--config={folder}/small.py', '--workdir=run')
  assert done.returncode == 0, done.stderr[-3000:]
  return run


def test_a_text_ends_where_the_answers_ended(command):
  done = command(
    'sample', '--checkpoint=run', '--prompt=7: что там? ', '--json=-', '--tokens=24'
  )
  assert done.returncode == 0, done.stderr[-3000:]
  (found,) = json.loads(done.stdout)['completions']
  assert (found['text'], found['finish_reason']) == ('море!', 'stop')


@pytest.mark.parametrize('name', ['evaluate', 'sample'])
def test_another_tokenizer_is_refused(command, name):
  more = ['--prompt=7'] if name == 'sample' else []
  done = command(name, '--checkpoint=run', '--config.data.tokenizer.vocab=300', *more)
  assert done.returncode != 0
  assert 'data.tokenizer = Bpe.Config(vocab=300' in done.stderr
  assert 'trained with Bpe.Config(vocab=280' in done.stderr


def test_going_on_with_other_documents_is_refused(command, folder):
  _write(folder, 'озеро!')
  try:
    done = command('train', f'--config={folder}/small.py', '--workdir=run')
  finally:
    _write(folder, 'море!')
  assert done.returncode != 0
  assert 'made with another tokenizer' in done.stderr
