"""The evaluate command: training's own figures again, every target once, anywhere."""

import functools
import json
import math
import random
import re

import numpy as np
import pytest

from mtpjax.data import sources

LENGTH, BATCH = 16, 8

CONFIG = """
from mtpjax import checkpoint, config, optimizers, schedules, step
from mtpjax.data import batches, sources, tokenizer
from mtpjax.drafters import sequential
from mtpjax.models import trunk


def get_config(arg: str = ''):
  return config.Config(
    steps=4,
    data=batches.Config(
      source=sources.Text(files=('TEXT/*.txt',), heldout=0.4),
      tokenizer=tokenizer.Characters.Config(),
      length=LENGTH,
      batch=BATCH,
    ),
    trunk=trunk.Config(width=16, layers=1, heads=2, ffn=32, remat='none'),
    drafter=sequential.Config(depth=3),
    optimizer=optimizers.AdamW(
      rate=schedules.WarmupCosine(peak=1e-2, warmup=0), accumulate=2, ema=0.5
    ),
    checkpoint=checkpoint.Config(every=2),
  )
"""

# Characters of one, two, three and four bytes.
WORDS = ('one', 'module', 'predicts', 'thé', 'tokén', '日本', '後', '🙂')


def write_texts(folder, seed):
  folder.mkdir()
  rng = random.Random(seed)
  for n in range(50):  # of any length: a last row and a last batch are not full
    text = ' '.join(rng.choices(WORDS, k=rng.randint(1, 9)))
    (folder / f'{n}.txt').write_text(text, 'utf-8')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  folder = tmp_path_factory.mktemp('evaluate')
  write_texts(folder / 'text', 0)
  write_texts(folder / 'other', 1)
  config = CONFIG.replace('TEXT', str(folder / 'text'))
  config = config.replace('LENGTH', str(LENGTH)).replace('BATCH', str(BATCH))
  (folder / 'small.py').write_text(config)
  return folder


@pytest.fixture(scope='module')
def command(place, start):
  return functools.partial(start, cwd=place)


@pytest.fixture(scope='module')
def trained(place, command):
  done = command('train', f'--config={place}/small.py', '--workdir=trained')
  assert done.returncode == 0, done.stderr[-3000:]
  return place / 'trained'


@pytest.fixture(scope='module')
def evaluate(place, command, trained):
  """The figures of --json, and what was said."""

  def run(*args, **kwargs):
    out = place / 'out' / f'{random.random()}.json'  # the folder is made
    done = command('evaluate', '--checkpoint=trained', f'--json={out}', *args, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout

  return run


@pytest.fixture(scope='module')
def again(evaluate):
  return evaluate()


def of_split(folder, split):
  """The texts of a split; which they are, the hash of their names says."""
  found = sources.Text(files=(f'{folder}/*.txt',), heldout=0.4).documents(split)
  return [document.text.decode() for document in found]


def count(texts, depths):
  """(targets, their UTF-8 bytes) of every depth, from the texts alone.

  A row holds no more than LENGTH characters of a text; a piece's first depth + 1
  characters are nobody's target at that depth.
  """
  pieces = [t[i : i + LENGTH] for t in texts for i in range(0, len(t), LENGTH)]
  targets = [sum(len(p[k + 1 :]) for p in pieces) for k in range(depths)]
  sizes = [sum(len(p[k + 1 :].encode()) for p in pieces) for k in range(depths)]
  return targets, sizes


def assert_counts_and_bits(figures, texts):
  targets, sizes = count(texts, 4)
  assert figures['counts_by_depth'] == targets
  assert sizes[0] > 1.1 * targets[0]  # else bits per byte would be bits per token
  bits = [
    loss * n / math.log(2) / size
    for loss, n, size in zip(figures['loss_by_depth'], targets, sizes, strict=True)
  ]
  np.testing.assert_allclose(figures['bits_per_byte_by_depth'], bits, rtol=1e-12)


FIGURES = ('loss', 'loss_by_depth', 'agreement_by_depth', 'counts_by_depth')


def test_the_figures_are_bit_for_bit_those_that_training_ended_with(again, trained):
  figures, said = again
  summary = json.loads((trained / 'summary.json').read_text())
  drafting = ('tau', 'by_draft_length', 'replay_tau', 'parity', 'draft_completion')
  for name in (*FIGURES, 'bits_per_byte_by_depth', 'objectives', 'mtp', *drafting):
    assert figures[name] == summary[name], name
  assert figures['step'] == 4
  assert figures['checkpoint'] == str(trained / 'checkpoints')
  assert figures['conditions']['mesh'] == summary['conditions']['mesh']
  assert f'{trained}/checkpoints, step 4' in said
  for depth, loss in zip(
    ('next', '1', '2', '3'), figures['loss_by_depth'], strict=True
  ):
    assert re.search(rf'^ *{depth} +{loss:.4f} ', said, re.MULTILINE)


def test_the_average_of_the_parameters_is_evaluated_unless_one_asks_otherwise(
  again, evaluate
):
  plain, _ = evaluate('--config.optimizer.ema=none')
  assert plain['counts_by_depth'] == again[0]['counts_by_depth']
  assert plain['loss'] < again[0]['loss'] - 0.01  # of four steps the last is the best


def test_every_held_out_target_is_counted_once(again, place):
  figures, _ = again
  texts = of_split(place / 'text', 'heldout')
  assert 10 < len(texts) < 40
  assert_counts_and_bits(figures, texts)


def test_other_files_are_evaluated_whole(evaluate, place, again):
  figures, _ = evaluate(f'--files={place}/other/*.txt')
  texts = [p.read_text('utf-8') for p in (place / 'other').iterdir()]
  assert_counts_and_bits(figures, texts)
  held = {p.name for p in (place / 'text').iterdir()}
  train, heldout = (of_split(place / 'text', s) for s in ('train', 'heldout'))
  both, _ = evaluate(f'--files={place}/text/*.txt')
  assert len(train) + len(heldout) == len(held)
  assert_counts_and_bits(both, [*train, *heldout])
  # Both splits' mean is between that of the one and of the other.
  assert both['loss'] != again[0]['loss']


def test_other_devices_and_batches_give_the_same_figures(evaluate, again):
  # Rows in another order over other devices, the last batch filled up otherwise.
  mesh = ('--config.mesh.fsdp=4', '--config.mesh.tensor=2')
  figures, _ = evaluate(*mesh, '--config.data.batch=16', devices=8)
  assert figures['conditions']['mesh']['tensor'] == 2
  assert figures['counts_by_depth'] == again[0]['counts_by_depth']
  for name in ('loss_by_depth', 'agreement_by_depth', 'bits_per_byte_by_depth'):
    np.testing.assert_allclose(figures[name], again[0][name], rtol=1e-5)


def test_a_mesh_needs_no_room_for_the_microbatches_of_training(evaluate, again):
  figures, _ = evaluate(devices=8)  # 8 rows on 8 devices, trained as 2 × 4
  np.testing.assert_allclose(
    figures['loss_by_depth'], again[0]['loss_by_depth'], rtol=1e-5
  )


def test_the_folder_of_checkpoints_does_too_and_an_older_step(command, place, trained):
  args = [f'--checkpoint={trained}/checkpoints', '--step=2', f'--json={place}/2.json']
  done = command('evaluate', *args)
  assert done.returncode == 0, done.stderr[-3000:]
  older = json.loads((place / '2.json').read_text())
  newer = json.loads((trained / 'summary.json').read_text())
  assert older['step'] == 2
  assert older['counts_by_depth'] == newer['counts_by_depth']
  assert older['loss'] > newer['loss'] + 0.01


def test_nothing_held_out_is_said_and_no_failure(evaluate):
  figures, said = evaluate('--config.data.source.heldout=0')
  assert 'held out: nothing' in said
  assert figures['loss'] is None
  assert figures['counts_by_depth'] == []


@pytest.mark.parametrize(
  ('args', 'said'),
  [
    ((), ('--checkpoint', 'is needed', '--checkpoint=runs/NAME')),
    (('--checkpoint=missing',), ('no checkpoint', '/missing is not a directory')),
    (('--checkpoint=text',), ('no checkpoint', '/text', '0.txt')),
    (('--checkpoint=trained', '--step=3'), ('no checkpoint', '3/', '2, 4')),
    (('--checkpoint=trained', '--files=none/*'), ("'none/*'", 'matches no file')),
    (('--checkpoint=trained', '--config.mehs.tensor=2'), ("did you mean 'mesh'?",)),
    (('--checkpoint=trained', '--config.mesh.tensor=2'), ('mesh', '1 devices')),
    (('--checkpoint=trained', '--chekpoint=x'), ('did you mean --checkpoint?',)),
  ],
)
def test_a_mistake_is_one_line_that_names_it(command, place, trained, args, said):
  done = command('evaluate', *args)
  assert done.returncode == 2, done.stderr[-3000:]
  errors = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert len(errors) == 1
  assert 'Traceback' not in done.stderr
  for text in said:
    assert text in done.stderr, done.stderr


def test_a_character_that_training_never_saw_is_named(command, place, trained):
  (place / 'greek.txt').write_text('λόγος', 'utf-8')
  done = command('evaluate', '--checkpoint=trained', '--files=greek.txt')
  assert done.returncode == 2
  assert done.stderr.startswith('error: ')
  assert 'λ' in done.stderr
  assert 'greek.txt' in done.stderr
