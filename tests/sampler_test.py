"""Text in, text out: pieces of characters, batches, streams, refusals."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from mtpjax import mesh, model
from mtpjax.data.sources import DataError
from mtpjax.data.tokenizer import Bytes, Characters
from mtpjax.drafters import sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk
from mtpjax.sampling import sampler as samplers
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder
from mtpjax.sampling.sampler import Sampler

LETTERS = Characters('abcdefghij')
SETTINGS = Settings(budget=9, temperature=1.0, seed=3)


@pytest.fixture(scope='module')
def sampler():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    sizes = trunk.Config(vocab=10, width=16, layers=1, heads=2, ffn=32)
    sizes.finalize()
    drafter = sequential.Config(depth=2, attend='rows')
    graphdef, _, make = model.init(sizes, {'drafter': drafter}, 0)
    yield Sampler(Decoder(graphdef, make(), longest=64), LETTERS, rows=2)


def test_completions_come_in_the_prompts_order_whatever_the_batches(sampler):
  prompts = ['abcabcabc', 'j', 'fade', 'bad', 'hi']
  together = sampler(prompts, SETTINGS)
  assert [one.prompt for one in together] == prompts
  assert sampler.batches(prompts) == [[1, 4], [3, 2], [0]]
  for one in together:
    (alone,) = sampler(one.prompt, SETTINGS)
    assert alone.text == one.text and alone.tokens == one.tokens
    assert one.text == LETTERS.decode(one.tokens) == ''.join(t for t, _ in one.pieces)
    assert len(one.tokens) == len(one.logprobs) == 9
    assert sum(len(t) for t, drafted in one.pieces if drafted) == one.stats.kept.sum()


def test_a_queue_and_samples_give_the_same_completions(sampler):
  prompts = ['abcabcabc', 'j', 'fade', 'bad', 'hi']
  plain, calls = sampler(prompts, SETTINGS), []
  # One text ends at a string, of which each row has its own.
  settings = [dataclasses.replace(SETTINGS, stop_strings=('jjj',))] * 5
  settings[2] = dataclasses.replace(SETTINGS, stop_strings=(plain[2].text[3:5],))
  together = sampler(prompts, settings)
  assert together[2].finish_reason == 'stop'

  def watch(batches):
    calls.extend(batches)
    return iter(batches)

  queued = sampler.throughput(prompts, settings, watch, samples=2)
  assert calls == [[1, 4, 3, 2, 0]]
  assert [one.prompt for one in queued] == [p for p in prompts for _ in range(2)]
  assert [one.tokens for one in queued[::2]] == [one.tokens for one in together]
  assert [one.text for one in queued[::2]] == [one.text for one in together]
  assert [one.tokens for one in queued[1::2]] != [one.tokens for one in together]
  # Calls of up to 32 prompts a row, about as many in each.
  assert [len(call) for call in sampler.batches(['a'] * 100, 32)] == [50, 50]


def test_a_stream_grows_and_ends_as_the_completion(sampler):
  prompts = ['abc', 'fade']
  parts = list(sampler.stream(prompts, SETTINGS))
  for before, after in itertools.pairwise(parts):
    for a, b in zip(before, after, strict=True):
      assert b.text.startswith(a.text)
  whole = sampler(prompts, SETTINGS)
  assert [one.text for one in parts[-1]] == [one.text for one in whole]
  assert [one.finish_reason for one in parts[0]] == [None, None]


def test_a_text_ends_at_the_end_that_its_tokenizer_has(sampler):
  prompts = ['abc', 'fade']
  plain, _ = sampler(prompts, SETTINGS)
  first = plain.tokens.index(plain.tokens[4])

  class Ending(Characters):
    end = plain.tokens[4]

  ending = Sampler(sampler.decoder, Ending(LETTERS.characters), rows=2)
  for found in (
    ending(prompts, SETTINGS),
    *list(ending.stream(prompts, SETTINGS))[-1:],
  ):
    assert found[0].finish_reason == 'stop'
    assert found[0].tokens == plain.tokens[: first + 1]
    assert found[0].text == plain.text[:first]  # the end is no text
  stops = [
    dataclasses.replace(SETTINGS, stop=stop) for stop in ((), (plain.tokens[0],))
  ]
  one, _ = ending(prompts, stops[0])
  assert (one.tokens, one.text) == (plain.tokens, plain.text)
  one, _ = ending(prompts, stops[1])  # the only one then, and text
  assert (one.tokens, one.text) == (plain.tokens[:1], plain.text[:1])


def test_a_stop_string_ends_a_prompt_alone(sampler):
  (plain,) = sampler('abc', SETTINGS)
  string = plain.text[3:5]
  (one,) = sampler('abc', dataclasses.replace(SETTINGS, stop_strings=(string,)))
  assert one.text == plain.text[: plain.text.index(string)]
  assert one.tokens == plain.tokens[: len(one.text) + 2]
  assert one.finish_reason == 'stop'


def test_everything_is_refused_before_anything_is_decoded(sampler):
  count = len(sampler.decoder.compilations)
  for prompts, settings, said in [
    ([], SETTINGS, 'at least one text'),
    (['a', ''], SETTINGS, r'prompts\[1\]'),
    (['a'], Settings(budget=64), 'longest=64'),
    (['a', 'b'], [SETTINGS], 'one for each of 2'),
    (['a'], Settings(stop=(10,)), 'stop'),
  ]:
    with pytest.raises(ConfigError, match=said):
      sampler(prompts, settings)
  with pytest.raises(DataError, match=r"prompts\[1\]: character 'z'"):
    sampler(['a', 'z'], SETTINGS)
  assert len(sampler.decoder.compilations) == count


def split(text, final=True, marks=None):
  data = text if isinstance(text, bytes) else text.encode()
  tokens = np.frombuffer(data, np.uint8)
  marks = np.zeros(len(tokens), bool) if marks is None else np.array(marks)
  return samplers.pieces(Bytes(), tokens, marks, final)


def test_a_character_of_several_bytes_is_held_back_until_it_is_whole():
  data = 'aж🙂'.encode()
  whole = [''.join(t for t, _ in split(data[:n], final=False)) for n in range(8)]
  assert whole == ['', 'a', 'a', 'aж', 'aж', 'aж', 'aж', 'aж🙂']


def test_characters_are_shown_however_many_tokens_a_stretch_takes():
  data = b'\xff' * 9 + 'ж'.encode()
  assert split(data[:-1], final=False) == []
  assert split(data, final=False) == [('\ufffd' * 9 + 'ж', False)]


def test_what_is_no_text_is_shown_in_the_end():
  assert split('ж'.encode()[:1]) == [('\ufffd', False)]
  assert ''.join(t for t, _ in split(b'\xff\xff\xff\xffa')).endswith('a')


def test_a_character_is_drafted_if_its_last_token_is():
  assert split('жa', marks=[False, True, False]) == [('ж', True), ('a', False)]
  assert split('ab', marks=[True, True]) == [('ab', True)]
