"""Synthetic tasks: every example read as a person would, and answered by search."""

import itertools
import json

import numpy as np
import pytest

from mtpjax.data import tasks, tokenizer, words
from mtpjax.data.sources import DataError

SIZES = [(2, 3, 10), (1, 2, 2), (5, 5, 30), (3, 2, 4)]


def solve(text):
  """The path of a star graph, given as text up to the equals sign, by search."""
  graph, question = text.split('/')
  start, goal, equals = question.split()[:3]
  assert equals == '='
  edges = [tuple(edge.split()) for edge in graph.split('|')]
  after: dict = {}
  for a, b in edges:
    after.setdefault(a, []).append(b)

  def search(path):
    if path[-1] == goal:
      return path
    found = [search([*path, b]) for b in after.get(path[-1], [])]
    return next((f for f in found if f), None)

  return edges, search([start])


@pytest.mark.parametrize(('paths', 'length', 'labels'), SIZES)
def test_a_star_is_a_star_and_its_answer_is_the_path(paths, length, labels):
  task = tasks.PathStar(paths, length, labels)
  task.check()
  words_of = task.tokenizer()
  made = task.examples(np.arange(300), seed=7)
  assert made.tokens.shape == (300, task.size)
  for row, mask, answer in zip(made.tokens, made.mask, made.answer, strict=True):
    text = words_of.decode(row)
    edges, path = solve(text)
    assert len(edges) == len(set(edges)) == paths * (length - 1)
    nodes = {n for edge in edges for n in edge}
    assert len(nodes) == 1 + paths * (length - 1) and all(
      int(n) < labels for n in nodes
    )
    centre = text.split('/')[1].split()[0]
    assert sum(a == centre for a, _ in edges) == paths
    assert path is not None and len(path) == length
    assert text.split('=')[1].split() == path
    assert words_of.decode(row[answer:]).split() == path
    assert mask.tolist() == [i >= answer for i in range(task.size)]


def test_goals_labels_and_edges_are_all_as_likely():
  task = tasks.PathStar(2, 3, 10)
  tokens = task.examples(np.arange(40_000), seed=0).tokens
  for column in (0, 13, 17):  # an edge's first label, the goal, the answer's last
    counts = np.bincount(tokens[:, column], minlength=10)
    chance = 40_000 / 10
    assert ((counts - chance) ** 2 / chance).sum() < 27.9  # χ², 9 degrees, p = .001
  # The path's own edge stands first among the centre's as often as the other's.
  centre, second = tokens[:, 12], tokens[:, 16]
  firsts = [
    next(b for a, b in zip(row[0:12:3], row[1:12:3], strict=True) if a == c)
    for row, c in zip(tokens, centre, strict=True)
  ]
  assert abs(np.mean(np.array(firsts) == second) - 0.5) < 0.01


@pytest.mark.parametrize('sizes', [(2, 6, 2, 40), (1, 2, 0, 3), (4, 9, 3, 30)])
def test_a_name_once_mentioned_says_what_follows(sizes):
  task = tasks.Induction(*sizes)
  task.check()
  made = task.examples(np.arange(300), seed=3)
  _, mentions, gap, vocabulary = sizes
  assert made.tokens.shape == (300, mentions * (2 + gap)) and made.mask.all()
  for row, answer in zip(made.tokens.tolist(), made.answer, strict=True):
    assert min(row) >= 0 and max(row) < vocabulary
    assert answer == len(row) - 1
    first, second = row[-2:]
    followers = [b for a, b in itertools.pairwise(row[:-1]) if a == first]
    # The only thing that ever followed its first token, at least once before.
    assert followers and set(followers) == {second}
  again = task.examples(np.arange(300), seed=3)
  np.testing.assert_array_equal(made.tokens, again.tokens)


@pytest.mark.parametrize('task', [tasks.PathStar(), tasks.Induction()])
def test_an_example_depends_on_its_number_and_the_seed_alone(task):
  whole = task.examples(np.arange(100), seed=1).tokens
  some = np.array([99, 0, 3, 3, 2**31 + 5])
  own = task.examples(some, seed=1).tokens
  np.testing.assert_array_equal(own[:4], whole[[99, 0, 3, 3]])
  for other in (task.examples(np.arange(100), seed=2).tokens, own[4:]):
    assert not (whole[: len(other)] == other).all(1).any()
  assert len({tuple(row) for row in whole.tolist()}) == 100  # none twice


def test_draws_are_splitmix64():
  """Against its definition, in Python's integers."""

  def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)

  got = tasks.draws(np.array([0, 5, 2**40]), seed=9, count=3)
  for row, index in zip(got, (0, 5, 2**40), strict=True):
    state = mix((index + mix(9)) % 2**64)
    for draw in row:
      state = (state + 0x9E3779B97F4A7C15) % 2**64
      assert int(draw) == mix(state)


def test_rows_hold_whole_examples_side_by_side():
  task = tasks.PathStar(heldout=5)
  rows = tasks.open_rows(task, 40, 'heldout', seed=4)  # room for two, and 4 are left
  assert len(rows) == 3 and rows.domains == {'': (0, 3)}
  batch = rows.rows(np.array([2, 0]), size=3)
  made = task.examples(np.array([4, 5, 0, 1]), seed=0)
  for n, row in enumerate([(0, 1), (2, 3)]):
    got = batch['tokens'][n]
    np.testing.assert_array_equal(got[:36], made.tokens[list(row)].reshape(-1))
    np.testing.assert_array_equal(batch['mask'][n][:36], made.mask[:2].reshape(-1))
    assert batch['segments'][n].tolist() == [1] * 18 + [2] * 18 + [0] * 4
    assert batch['positions'][n].tolist() == [*range(18), *range(18), *[0] * 4]
    assert not batch['mask'][n][36:].any() and not got[36:].any()
  assert not any(batch[name][2].any() for name in batch)
  np.testing.assert_array_equal(rows.row(2)['tokens'], batch['tokens'][0])
  assert len(rows.problems(100).tokens) == 6 and len(rows.problems(4).tokens) == 4
  for bad in (3, -1):
    with pytest.raises(IndexError):
      rows.rows(np.array([bad]))


def test_training_rows_are_endless_fresh_and_not_the_held_out_ones():
  task = tasks.PathStar()
  train = tasks.open_rows(task, 18, 'train', seed=0)
  assert len(train) == 2**31 - 1
  train.rows(np.array([2**31 - 2]))
  held = tasks.open_rows(task, 18, 'heldout', seed=0)
  same = train.rows(np.arange(64))['tokens'] == held.rows(np.arange(64))['tokens']
  assert not same.all(1).any()
  fingerprints = {
    rows.fingerprint()
    for rows in (
      train,
      held,
      tasks.open_rows(task, 18, 'train', seed=1),
      tasks.open_rows(task, 36, 'train', seed=0),
      tasks.open_rows(tasks.PathStar(labels=9), 18, 'train', seed=0),
    )
  }
  assert len(fingerprints) == 5


@pytest.mark.parametrize(
  ('task', 'said'),
  [
    (tasks.PathStar(paths=4, length=4, labels=12), 'labels=12.*13 of them'),
    (tasks.PathStar(length=1), 'length=1'),
    (tasks.PathStar(paths=0), 'paths=0'),
    (tasks.Induction(names=3, mentions=3), 'mentions=3'),
    (tasks.Induction(names=20, mentions=21), 'words=40'),
    (tasks.PathStar(length=5), 'data.length=18.*32 tokens'),
  ],
)
def test_what_does_not_fit_is_refused(task, said):
  with pytest.raises(DataError, match=said):
    tasks.open_rows(task, 18, 'train', 0)


def test_words_are_tokens():
  own = words.Words(('a', 'bc', 'ж', '='))
  assert own.encode(' bc a\n= ж ').tolist() == [1, 0, 3, 2]
  assert own.decode([1, 0, 3, 2]) == 'bc a = ж'
  assert own.decode([]) == '' and own.encode('').tolist() == []
  assert own.bytes_per_token.tolist() == [2, 3, 3, 2] and own.vocab_size == 4
  assert b''.join(own.token_bytes[n] for n in (1, 0, 3, 2)).decode() == ' bc a = ж'
  assert tokenizer.from_json(own.to_json()) == own
  assert tokenizer.from_json(own.to_json()).fingerprint == own.fingerprint
  assert words.Words(('a', 'bc', '=', 'ж')).fingerprint != own.fingerprint
  with pytest.raises(DataError, match="'d' at index 2 is not"):
    own.encode('a d')
  for bad in ([4], [-1]):
    with pytest.raises(DataError, match='no word of 4'):
      own.decode(bad)
  for bad in ((), ('a', 'a'), ('a b',), ('',)):
    with pytest.raises(DataError, match='distinct'):
      words.Words(bad)
  with pytest.raises(DataError):
    tokenizer.from_json(json.dumps({'kind': 'words', 'words': []}))
