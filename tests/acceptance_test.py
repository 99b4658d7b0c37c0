"""What drafting is worth: by really drafting, by a replay, and where texts differ."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from mtpjax import acceptance, mesh, model
from mtpjax.data import pack, tokenizer
from mtpjax.drafters import parallel, residual, sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk
from mtpjax.sampling import trees
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder

V = 6  # few, so that untrained drafts are right now and then
TEXT = tokenizer.Characters('abcdef')
CONFIG = acceptance.Config(prompts=5, prompt_tokens=7, tokens=33)
DRAFTERS = {
  'depth': sequential.Config(depth=3),
  'rows': sequential.Config(depth=3, attend='rows'),
  'parallel': parallel.Config(depth=2),
  'linear': parallel.Config(depth=2, form='linear'),
  'anticausal': parallel.Config(depth=1, form='anticausal'),  # has no parameters
  'residual': residual.Config(depth=2, form='medusa'),
}


@pytest.fixture(autouse=True, scope='module')
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    yield


def build(drafter):
  sizes = trunk.Config(vocab=V, width=16, layers=2, heads=2, ffn=32, windows=(5, 0))
  sizes.finalize()
  parts = {} if drafter is None else {'drafter': drafter}
  graphdef, _, make = model.init(sizes, parts, 1)
  params = make()
  # Logits far enough apart that greedy text wanders, and no two are alike.
  params['trunk']['unembedding'] = params['trunk']['unembedding'] * 40.0
  params['trunk']['embedding'] = params['trunk']['embedding'] * 20.0
  own = params.get('objectives', {}).get('drafter', {}).get('unembedding', {})
  for k, name in enumerate(own, 1):  # each a head unlike the trunk's and the others
    own[name] = jax.device_put(np.roll(own[name], k, 0), own[name].sharding)
  return graphdef, params


@functools.cache
def measured(name):
  return acceptance.measure(*build(DRAFTERS[name]), CONFIG, rows(*[12] * 9), TEXT)


def rows(*lengths):
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, V, n).astype(np.int32) for n in lengths]
  return pack.pack(pack.concatenate(iter(texts), V), 12, 0)


@pytest.mark.parametrize('name', DRAFTERS)
def test_the_replay_of_plain_text_gives_the_samplers_tau(name):
  found = measured(name)
  assert found is not None and found['parity'] and found['divergences'] == []
  assert 1.0 < found['tau'] < found['by_draft_length'][-1]['tau'] + 1e-9
  assert found['replay_tau'] == pytest.approx(found['tau'], abs=1e-12)
  assert found['new_tokens'] == 5 * 33 and found['plain_passes'] == 33
  assert found['draft_passes'] <= 33
  assert (
    found['completion'] == found['draft_completion'] and len(found['completion']) == 33
  )


def test_ranks_of_the_right_tokens_and_the_tree_they_make():
  found = measured('rows')
  assert found is not None
  table, best = found['acceptance_by_rank'], found['best_tree']
  assert [len(row) for row in table] == [acceptance.RANKS] * 3
  for row in table:  # six tokens: each is among the candidates
    assert sum(row) == pytest.approx(1) and row == sorted(row, reverse=True)
  tree = trees.parse(best['tree'], 3, V, 3)
  wanted = trees.Tree.best(table, acceptance.BUDGET)
  assert tree == wanted and wanted.nodes == acceptance.BUDGET
  assert best['tau'] == pytest.approx(1 + wanted.accepted(table))
  assert f'--tree={tree}' in acceptance.table(found)


def test_a_text_that_ends_elsewhere_leaves_the_plain_one():
  graphdef, params = build(DRAFTERS['rows'])
  prompts = acceptance.prompts(CONFIG, rows(*[12] * 9), TEXT)
  assert prompts is not None
  plain = Decoder(graphdef, params, draft=0, longest=40).generate(
    *prompts, Settings(budget=9)
  )
  assert not acceptance.divergences(graphdef, params, *prompts, plain, plain)
  cut = dataclasses.replace(plain, lengths=plain.lengths - [0, 3, 0, 0, 0])
  (found,) = acceptance.divergences(graphdef, params, *prompts, plain, cut)
  assert (found['row'], found['index']) == (1, 6)


def test_ranks_are_counted_where_the_text_is():
  rng = np.random.default_rng(4)
  prompts, new = np.array([4, 1]), np.array([20, 9])
  ranks = rng.integers(0, acceptance.RANKS + 1, (3, 2, 30))
  found = acceptance._by_rank(ranks, prompts, new)
  assert found is not None
  for k in range(3):
    here = [
      ranks[k, b, i]
      for b in range(2)
      for i in range(prompts[b] - 1, 30)
      if i + k + 2 < prompts[b] + new[b]
    ]
    counts = [here.count(r) / len(here) for r in range(acceptance.RANKS)]
    np.testing.assert_allclose(found[k], sorted(counts, reverse=True))
  assert acceptance._by_rank(ranks, prompts, np.array([2, 1])) is None


@dataclasses.dataclass(frozen=True)
class Ending(tokenizer.Characters):
  end: int = 2


def test_nothing_after_the_end_counts():
  graphdef, params = build(DRAFTERS['rows'])
  plan = rows(*[12] * 9)
  prompts = acceptance.prompts(CONFIG, plan, TEXT)
  assert prompts is not None
  apart, together = (
    Decoder(graphdef, params, draft=k, longest=40).generate for k in (0, 3)
  )
  settings = [Settings(budget=33, stop=(end,)) for end in range(V)]
  runs = [together(*prompts, own) for own in settings]
  # The end is a token that comes, but after some right drafts.
  right = [x.stats.accepted.sum() * ('stop' in x.finish_reason) for x in runs]
  end = int(np.argmax(right))
  drafted, plain = runs[end], apart(*prompts, settings[end])
  assert right[end] and plain.lengths.sum() < 5 * 33
  ending = Ending('abcdef', end)
  found = acceptance.measure(graphdef, params, CONFIG, plan, ending)
  assert found is not None and found['parity']
  assert found['new_tokens'] == plain.lengths.sum() and found['tau'] > 1
  assert found['plain_passes'] == plain.rows[0].passes
  assert found['draft_passes'] == drafted.rows[0].passes
  assert found['completion'] == TEXT.decode(plain.tokens[0, : plain.lengths[0]])
  assert found['tau'] == found['by_draft_length'][2]['tau'] == drafted.stats.tau
  assert found['replay_tau'] == pytest.approx(found['tau'], abs=1e-12)


def test_each_draft_length_is_what_its_own_decoder_counts():
  graphdef, params = build(DRAFTERS['rows'])
  found = measured('rows')
  prompts = acceptance.prompts(CONFIG, rows(*[12] * 9), TEXT)
  assert found is not None and prompts is not None
  one, two, three = found['by_draft_length']
  decoder = Decoder(graphdef, params, draft=2, longest=40)
  alone = decoder.generate(*prompts, Settings(budget=33))
  assert two == {name: alone.stats.to_json()[name] for name in two}
  assert one != two != three == {name: found[name] for name in three}


def test_replay_against_a_walk_by_hand():
  rng = np.random.default_rng(3)
  K, T = 3, 30
  right = rng.random((K, 2, T)) < 0.6
  prompts, new, budget = np.array([4, 1]), np.array([20, 9]), 20  # one ends early
  rounds = accepted = 0
  proposed = np.zeros(K, int)
  for b in range(2):
    length, end = prompts[b] + 1, prompts[b] + budget
    while length < prompts[b] + new[b]:
      drafts = min(K, end - length - 1)
      row = length - 2  # the last token has no features yet
      run = len(list(itertools.takewhile(bool, right[:drafts, b, row])))
      rounds, accepted = rounds + 1, accepted + run
      proposed += np.arange(1, K + 1) <= drafts
      length += run + 1
    assert length >= prompts[b] + new[b]
  found = acceptance.replay(right, prompts, new, budget)
  assert found.rounds == rounds and found.accepted.sum() == accepted
  np.testing.assert_array_equal(found.proposed, proposed)
  assert found.delivered == 29 and found.prefills == 2
  assert found.passes == rounds + 2


def test_prompts_are_starts_of_documents_spread_over_the_rows_and_the_text_first():
  plan = rows(3, 12, 12, 12, 5, 6)
  ids, lengths = acceptance.prompts(CONFIG, plan, TEXT) or pytest.fail('none')
  assert len(ids) == min(5, len(plan)) and lengths.max() <= 7
  for index, row in enumerate(np.linspace(0, len(plan) - 1, len(ids)).astype(int)):
    own = plan.row(int(row))
    first = own['tokens'][own['segments'] == own['segments'][0]][:7]
    np.testing.assert_array_equal(ids[index, : lengths[index]], first)
  with_text = dataclasses.replace(CONFIG, text='fade')
  ids, lengths = acceptance.prompts(with_text, plan, TEXT) or pytest.fail('none')
  assert TEXT.decode(ids[0, : lengths[0]]) == 'fade'


def test_a_question_longer_than_the_learned_positions_is_refused():
  ids = np.arange(24) % V
  mask = np.arange(24) >= 20  # a question of 20 tokens
  plan = pack.pack(pack.Corpus(ids.astype(np.uint8), np.array([0, 24]), mask), 24, 0)
  _, lengths = acceptance.prompts(CONFIG, plan, TEXT, 53) or pytest.fail('none')
  assert lengths.tolist() == [20]
  with pytest.raises(ConfigError, match=r'learned_positions = 52: .* 53 positions'):
    acceptance.prompts(CONFIG, plan, TEXT, 52)


def test_nothing_to_measure_is_said():
  graphdef, params = build(DRAFTERS['rows'])
  plan = rows(12)
  none = dataclasses.replace(CONFIG, prompts=0)
  assert acceptance.measure(graphdef, params, none, plan, TEXT) is None
  assert 'it takes a drafter' in acceptance.table(None)
  graphdef, params = build(None)
  assert acceptance.measure(graphdef, params, CONFIG, plan, TEXT) is None


def test_texts_that_differ_are_reported_with_the_margin_there(monkeypatch):
  graphdef, params = build(DRAFTERS['rows'])
  right = Decoder.generate

  def spoilt(self, *args):
    out = right(self, *args)
    if self.draft:
      out.tokens[1, 4] = (out.tokens[1, 4] + 1) % V
    return out

  monkeypatch.setattr(Decoder, 'generate', spoilt)
  found = acceptance.measure(graphdef, params, CONFIG, rows(*[12] * 9), TEXT)
  assert found is not None and not found['parity'] and not found['rounding_explains']
  (where,) = found['divergences']
  assert (where['row'], where['index']) == (1, 4) and where['margin'] > 1e-5
  assert 'NOT what rounding explains' in acceptance.table(found)


@pytest.mark.parametrize(
  'values, said',
  [({'tokens': 0}, 'decode.tokens = 0'), ({'text': ''}, "decode.text = ''")],
)
def test_bad_fields_are_named(values, said):
  with pytest.raises(ConfigError, match=said):
    dataclasses.replace(CONFIG, **values).finalize()
