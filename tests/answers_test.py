"""Exact answers, against plain decoding, whole rows again for every token."""

import dataclasses

import jax
import numpy as np
import pytest
from decoding import build, on_mesh, plainly

from mtpjax import answers
from mtpjax.data import pack, tasks
from mtpjax.drafters import sequential

TASK = tasks.PathStar(heldout=40)


@pytest.mark.parametrize(
  'sizes', [{'fsdp': 1}, {'fsdp': 2, 'tensor': 2}], ids=['1', '4']
)
def test_the_share_is_that_of_whole_answers(sizes, monkeypatch):
  monkeypatch.setattr(answers, 'BATCH', 16)  # a last batch that is not full
  rows = tasks.open_rows(TASK, TASK.size, 'heldout', 0)
  problems = rows.problems(40)
  with on_mesh(fsdp=1):
    graphdef, params = build(sequential.Config(depth=1), vocab=13)
    start = int(problems.answer[0])
    prompts, lengths = problems.tokens[:, :start], problems.answer
    texts, _, _ = plainly(graphdef, params, prompts, lengths, TASK.length)
  # Every third answer is made what the model says, one of them but for its last token.
  right = problems.tokens.copy()
  for n in range(0, 40, 3):
    right[n] = texts[n][: TASK.size]
  right[3, -1] = (right[3, -1] + 1) % 13
  known = sum(texts[n][: TASK.size].tolist() == right[n].tolist() for n in range(40))
  assert 10 <= known <= 16
  monkeypatch.setattr(
    tasks.TaskRows,
    'problems',
    lambda self, count: tasks.Examples(
      right[:count], problems.mask, problems.answer[:count]
    ),
  )
  with on_mesh(**sizes):
    graphdef, params = build(sequential.Config(depth=1), vocab=13)
    own = answers.Answers(graphdef, rows, 1000)
    found = own.measure(params)
    assert found == {'exact_match': known / 40, 'problems': 40}
    spoilt = jax.tree.map(lambda x: x * 0, params)
    assert own.measure(spoilt)['exact_match'] < found['exact_match']
    assert own.measure(params) == found  # compiled once, other parameters
    assert own._decoder is not None and len(own._decoder.compilations) == 1
  said = answers.table(found)
  assert f'{known / 40:.4f} of 40 problems' in said


def test_a_mixture_has_the_answers_of_its_tasks(monkeypatch):
  settings = {'star': tasks.PathStar(heldout=9), 'long': tasks.PathStar(2, 4, 10, 24)}
  length = settings['long'].size
  rows: dict[str, pack.Rows] = {
    name: tasks.open_rows(task, length, 'heldout', 0) for name, task in settings.items()
  }
  rows['text'] = pack.pack(pack.concatenate([np.arange(5)], 13), length, 0)
  with on_mesh(fsdp=1):
    graphdef, params = build(vocab=13)
    made = tasks.TaskRows.problems

    def some_right(self, count):
      """A third of the stars, a quarter of the long ones."""
      found = made(self, count)
      start, right = int(found.answer[0]), found.tokens.copy()
      text, _, _ = plainly(
        graphdef, params, right[:, :start], found.answer, right.shape[1] - start
      )
      each = 3 if self is rows['star'] else 4
      right[::each] = text[::each, : right.shape[1]]
      return dataclasses.replace(found, tokens=right)

    monkeypatch.setattr(tasks.TaskRows, 'problems', some_right)
    found = answers.Answers(graphdef, pack.Join(rows), 100).measure(params)
  assert found == {
    'exact_match': (3 + 6) / 33,
    'problems': 33,
    'exact_match_by_domain': {'star': 3 / 9, 'long': 6 / 24},
  }
  assert '33 problems (0.3333 of star, 0.2500 of long)' in answers.table(found)


def test_what_has_no_problems_has_no_answers():
  text = pack.pack(pack.concatenate([np.arange(5)], 13), 8, 0)
  rows = tasks.open_rows(TASK, TASK.size, 'heldout', 0)
  with on_mesh(fsdp=1):
    for own in (answers.Answers(None, text, 10), answers.Answers(None, rows, 0)):
      assert own.measure({}) == {} and answers.table({}) == ''
