"""Tokenizers: exact round trips, byte counts, and what is refused."""

import json
import time

import numpy as np
import pytest

from mtpjax.data import tokenizer
from mtpjax.data.sources import DataError, Document
from mtpjax.data.tokenizer import Bytes, Characters

TEXTS = ['', 'a', 'naïve\r\n', 'У лукоморья', '漢字 🙂\x00\u2028', 'e\u0301']


def _documents(*texts):
  return [Document(str(i), text.encode()) for i, text in enumerate(texts)]


def _characters(*texts):
  return Characters.Config().build(_documents(*texts))


@pytest.mark.parametrize('built', [Bytes.Config().build([]), _characters(*TEXTS)])
@pytest.mark.parametrize('text', TEXTS)
def test_round_trip_and_byte_counts(built, text):
  ids = built.encode(text)
  assert ids.dtype == np.int32
  np.testing.assert_array_equal(ids, built.encode(text.encode()))
  assert built.decode(ids) == text
  assert built.decode(ids.tolist()) == text
  counts = tokenizer.num_bytes(built, ids)
  assert (counts.dtype, counts.shape) == (np.int32, ids.shape)
  assert counts.sum() == len(text.encode())
  if isinstance(built, Bytes):
    assert ids.tolist() == list(text.encode())
  else:  # a loop over the characters
    assert ids.tolist() == [built.characters.index(c) for c in text]
    assert counts.tolist() == [len(c.encode()) for c in text]
  assert b''.join(built.token_bytes[n] for n in ids) == text.encode()


def test_byte_counts_keep_the_shape():
  built = _characters('aé漢')
  ids = np.array([[0, 1], [2, 2]], np.uint8)
  assert tokenizer.num_bytes(built, ids).tolist() == [[1, 2], [3, 3]]
  assert built.bytes_per_token.tolist() == [1, 2, 3]
  assert Bytes().bytes_per_token.tolist() == [1] * 256


def test_the_vocabulary_is_the_sorted_characters_of_all_documents():
  built = _characters('cab', 'é', '', 'b🙂')
  assert built.characters == 'abcé🙂'
  assert built.vocab_size == 5
  assert Bytes().vocab_size == 256


def test_documents_are_joined_over_chunks(monkeypatch):
  monkeypatch.setattr(tokenizer, '_CHUNK_BYTES', 3)
  assert _characters('é', 'ab', 'c', 'dé', 'z').characters == 'abcdzé'


def test_bytes_decode_replaces_what_is_not_utf8():
  assert Bytes().decode([0xFF, 65, 0xC3]) == '\ufffdA\ufffd'


def test_bytes_may_have_an_end():
  own = Bytes.Config(ends=True).build(())
  assert (own.vocab_size, own.end, own.special) == (257, 256, {'end': 256})
  assert own.encode('жa').tolist() == [0xD0, 0xB6, 0x61]
  assert own.decode([0xD0, 0xB6, 256, 0x61, 256]) == 'жa'
  assert own.bytes_per_token.tolist() == [1] * 256 + [0]
  assert b''.join(own.token_bytes) == bytes(range(256)) and own.token_bytes[-1] == b''
  assert tokenizer.from_json(own.to_json()) == own
  assert own.fingerprint != Bytes().fingerprint
  with pytest.raises(DataError, match='id 257'):
    own.decode([257])
  with pytest.raises(DataError, match='id 256'):
    Bytes().decode([256])
  ids, _ = tokenizer.encode_document(own, Document('a', b'xy'))
  assert ids.tolist() == [0x78, 0x79, 256]


def test_another_run_s_tokenizer_can_be_used_again(tmp_path):
  own = tokenizer.Characters('abж')
  (tmp_path / 'vocabulary.json').write_text(own.to_json(), 'utf-8')
  config = tokenizer.Saved(str(tmp_path))
  assert isinstance(config, tokenizer.TokenizerConfig)
  assert config.build([Document('x', b'zzz')]) == own
  for raw in (b'no JSON', b'\xff'):
    (tmp_path / 'vocabulary.json').write_bytes(raw)
    with pytest.raises(DataError, match='tokenizer'):
      config.build([])
  with pytest.raises(DataError, match='name the directory of a run'):
    tokenizer.Saved(str(tmp_path / 'nowhere')).build([])


@pytest.mark.parametrize('character', ['b', '\x00', 'z', '\u2028', '🙂', '\ud800'])
def test_an_unknown_character_is_named(character):
  built = _characters('?ac\u2027\u2029')  # '?' stands in for nothing
  point = f'U\\+{ord(character):04X}'
  with pytest.raises(DataError, match=f'doc:7: character .* \\({point}\\) at index 2'):
    built.encode(f'ac{character}a{character}', where='doc:7')


def test_what_is_refused():
  built = _characters('ab')
  with pytest.raises(DataError, match='byte 0xff at 1 is not UTF-8'):
    built.encode(b'a\xff')
  with pytest.raises(DataError, match=r'U\+D800'):
    Bytes().encode('a\ud800')
  for ids, match in (([0, 2], 'id 2 .*of 2'), ([-1], 'id -1'), ([0.5], 'float64')):
    with pytest.raises(DataError, match=match):
      built.decode(ids)
    with pytest.raises(DataError, match=match):
      tokenizer.num_bytes(built, ids)
  with pytest.raises(DataError, match=r'id 256 .*of 256'):
    Bytes().decode([256])
  for characters in ('', 'ba', 'aa'):
    with pytest.raises(DataError, match='non-empty, ascending and distinct'):
      Characters(characters)
  with pytest.raises(DataError, match='non-empty'):
    _characters()


def test_json_carries_the_tokenizer():
  made = [Bytes(), *(_characters(t) for t in ('ab', 'abc', 'é🙂\u2028"\\'))]
  for built in made:
    again = tokenizer.from_json(built.to_json())
    assert again == built
    assert again.fingerprint == built.fingerprint
    assert json.loads(built.to_json())
  assert len({built.fingerprint for built in made}) == len(made)
  for text in ('', '[]', '{"kind": "words"}', '{"kind": "bytes", "x": 1}', '{}'):
    with pytest.raises(DataError, match='tokenizer='):
      tokenizer.from_json(text)
  with pytest.raises(DataError, match='ascending'):
    tokenizer.from_json('{"kind": "characters", "characters": "ba"}')


def test_megabytes_take_no_python_loop():
  text = 'naïve text, 漢字\n' * 300_000
  start = time.perf_counter()
  built = _characters(text)
  assert built.decode(built.encode(text)) == text
  assert Bytes().decode(Bytes().encode(text)) == text
  assert time.perf_counter() - start < 5


# Documents


def _encoded(built, *args, **kwargs):
  ids, mask = tokenizer.encode_document(built, Document('a.bin:3', *args, **kwargs))
  assert ids.dtype == np.int32
  assert mask is None or mask.dtype == bool
  return ids.tolist(), None if mask is None else mask.tolist()


PARTS = (('да '.encode(), False), (b'', True), ('нет'.encode(), True), (b'!', False))


@pytest.mark.parametrize('last', [True, False])
def test_the_mask_of_parts_is_that_of_their_characters(last):
  parts = PARTS[: 3 if last else 4]
  text = b''.join(part for part, _ in parts)
  built = _characters(text.decode())
  flags = [flag for part, flag in parts for _ in part.decode()]
  assert _encoded(built, text, parts) == (built.encode(text).tolist(), flags)
  flags = [flag for part, flag in parts for _ in part]
  assert _encoded(Bytes(ends=True), text, parts) == ([*text, 256], [*flags, last])


def test_an_end_follows_each_document_once():
  for text in (b'', b'ab'):
    assert _encoded(Bytes(ends=True), text) == ([*text, 256], None)
    assert _encoded(Bytes(), text) == ([*text], None)
  for stored, flags in (([1, 2], [0, 1]), ([1, 2, 256], [0, 1, 0])):
    found = _encoded(
      Bytes(ends=True), tokens=np.array(stored, 'u2'), mask=np.array(flags)
    )
    assert found == ([1, 2, 256], [False, True, len(stored) == 2])
  assert _encoded(Bytes(ends=True), b'', ()) == ([256], [False])
  none = np.zeros(0, np.int32)
  assert _encoded(Bytes(ends=True), tokens=none, mask=none) == ([256], [False])


def test_stored_ids_are_checked():
  for tokens, mask, match in (
    ([0, 256], None, 'a.bin:3: id 256 is outside .* of 256: set data.tokenizer'),
    ([-1], None, 'a.bin:3: id -1'),
    ([0.5], None, 'a.bin:3: ids have dtype float64'),
    ([1, 2], [True], 'a.bin:3: a mask of 1 for 2 ids'),
  ):
    flags = None if mask is None else np.array(mask)
    with pytest.raises(DataError, match=match):
      _encoded(Bytes(), tokens=np.array(tokens), mask=flags)
