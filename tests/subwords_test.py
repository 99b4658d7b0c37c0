"""Subwords: against the library used directly, byte by byte, and each broken file."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

from mtpjax import fields
from mtpjax.data import batches, tokenizer
from mtpjax.data.sources import DataError, Document, Text
from mtpjax.data.subwords import Bpe, HuggingFace
from mtpjax.sampling.sampler import pieces

TEXTS = [
  '',
  ' ',
  '  two  leading\n\n\t',
  'naïve\r\nline\rend',
  'У лукоморья дуб зелёный;\u2028Златая цепь на дубе том',
  '漢字 🙂👩‍👩‍👧 \x00\ufeff',
  'def main(x): return \'x\' + "y"  # 12345',
  'e\u0301 ﷺ \U0010ffff',
]
CORPUS = [f'{text} {n % 7} и снова {text}' for n, text in enumerate(TEXTS * 4)]


def _documents(texts):
  return [Document(str(n), text.encode()) for n, text in enumerate(texts)]


@pytest.fixture(scope='module')
def bpe():
  return Bpe.Config(vocab=400).build(_documents(CORPUS))


def _plain():
  """The library's own, made as its documentation makes a byte-level one."""
  made = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
  made.decoder = decoders.ByteLevel()  # pyright: ignore
  return made


def _bytes_of():
  """Byte of each character of a byte-level vocabulary: printable ones are themselves,
  the others follow from U+0100 in order."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = [byte for byte in range(256) if byte not in plain]
  return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}


# Trained here


def test_training_is_the_librarys(bpe):
  made = _plain()
  trainer = trainers.BpeTrainer(
    vocab_size=400,
    min_frequency=2,
    special_tokens=['<|end|>'],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(iter(CORPUS), trainer)
  assert bpe.vocabulary == made.get_vocab()
  assert bpe.vocab_size == 400
  assert bpe.special == {'end': bpe.end} == {'end': made.token_to_id('<|end|>')}
  for text in TEXTS:
    assert bpe.encode(text).tolist() == made.encode(text).ids


@pytest.mark.parametrize('text', [*TEXTS, 'unseen: ქართული ☃', 'a<|end|>b'])
def test_any_text_comes_back(bpe, text):
  ids = bpe.encode(text)
  assert ids.dtype == np.int32
  np.testing.assert_array_equal(ids, bpe.encode(text.encode()))
  assert bpe.decode(ids) == bpe.decode(ids.tolist()) == text
  byte = _bytes_of()
  spelt = {number: token for token, number in bpe.vocabulary.items()}
  found = b''
  for number in ids.tolist():
    token = spelt[number]
    own = token.encode() if number == bpe.end else bytes(byte[c] for c in token)
    found += own
    size = 0 if number == bpe.end else len(own)
    assert bpe.bytes_per_token[number] == size
  assert found == text.encode()
  ends = text.count('<|end|>')
  assert tokenizer.num_bytes(bpe, ids).sum() == len(text.encode()) - 7 * ends


def test_the_same_documents_give_the_same_tokenizer(bpe):
  again = Bpe.Config(vocab=400).build(_documents(CORPUS), _documents(['held out'] * 9))
  assert again == bpe and again.fingerprint == bpe.fingerprint
  other = Bpe.Config(vocab=400).build(_documents([*CORPUS, *['held out'] * 9]))
  assert other.fingerprint != bpe.fingerprint
  code = (
    'import json, sys; from mtpjax.data.subwords import Bpe, Document;'
    'texts = json.load(sys.stdin);'
    'print(Bpe.Config(vocab=400).build('
    '[Document("", t.encode()) for t in texts]).fingerprint)'
  )
  for seed in '12':
    environment = {**os.environ, 'PYTHONHASHSEED': seed}
    environment['TOKENIZERS_PARALLELISM'] = 'true'
    run = subprocess.run(
      [sys.executable, '-c', code],
      input=json.dumps(CORPUS),
      env=environment,
      capture_output=True,
      text=True,
    )
    assert run.stdout.strip() == bpe.fingerprint, run.stderr


def test_pairs_that_occur_once_are_no_tokens():
  built = Bpe.Config(vocab=300, end=None).build(_documents(['ab ab ab', 'cd']))
  assert built.vocab_size == 258  # ab, and it behind a space
  assert built.end is None and built.special == {}
  assert {'ab', 'Ġab'} <= set(built.vocabulary) and 'cd' not in built.vocabulary


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'vocab': 256}, 'tokenizer.vocab=256: 256 bytes and 1 special .* at least 257'),
    ({'vocab': 255, 'end': None}, 'vocab=255.*at least 256'),
    ({'end': ''}, "tokenizer.end='': text could spell it"),
    ({'end': '\n'}, 'text could spell it'),
    ({'end': 'fin·é'}, 'several ASCII'),
  ],
)
def test_what_cannot_be_trained(changes, match):
  with pytest.raises(DataError, match=match):
    Bpe.Config(**changes).build(_documents(CORPUS))


def test_a_fault_of_the_source_is_the_sources():
  def documents():
    yield from _documents(['a'] * 300)
    raise DataError('line 301 is bad')

  with pytest.raises(DataError, match='line 301 is bad'):
    Bpe.Config().build(documents())


def test_documents_without_text_train_nothing():
  for documents in ([], [Document('a', tokens=np.array([1, 2]))]):
    with pytest.raises(DataError, match='no document has text to train on'):
      Bpe.Config().build(documents)
  assert Bpe.Config(vocab=257).build(_documents(['a'])).vocab_size == 257


def test_rows_hold_documents_with_their_ends(tmp_path):
  for n, text in enumerate(CORPUS):
    (tmp_path / f'{n:02}.txt').write_text(text, 'utf-8', newline='')
  source = Text((f'{tmp_path}/*.txt',), heldout=0.3)
  config = batches.Config(source=source, tokenizer=Bpe.Config(vocab=300), length=256)
  data = batches.open_data(config, 0)
  train = list(source.documents('train'))
  assert data.tokenizer == Bpe.Config(vocab=300).build(train)  # held-out text unseen
  found = []
  for index in range(len(data.train)):
    row = data.train.row(index)
    for segment in range(1, row['segments'].max() + 1):
      ids = row['tokens'][row['segments'] == segment]
      assert ids[-1] == data.tokenizer.end
      found.append(data.tokenizer.decode(ids[:-1]))
  assert sorted(found) == sorted(d.text.decode() for d in train)


def test_a_forked_process_gets_no_warning():
  code = (
    'import os; from mtpjax.data.subwords import Bpe, Document;'
    'built = Bpe.Config(vocab=300).build([Document("", b"ab " * 99)] * 99);'
    'child = os.fork();'
    'built.encode("ab ab");'
    'child or os._exit(0);'
    'os.waitpid(child, 0)'
  )
  environment = {k: v for k, v in os.environ.items() if 'TOKENIZERS' not in k}
  run = subprocess.run(
    [sys.executable, '-c', code], env=environment, capture_output=True, text=True
  )
  assert (run.returncode, run.stdout, run.stderr) == (0, '', '')


# Made by others


def _byte_level(specials=('<s>', '</s>', '<pad>')):
  made = _plain()
  trainer = trainers.BpeTrainer(
    vocab_size=320,
    special_tokens=list(specials),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(CORPUS, trainer)
  return made


def _sentencepiece():
  """As Llama 2 has it: ▁ for spaces, the first one dropped, bytes for what is rare."""
  letters = sorted(set('▁helo wrdабв') - {' '})
  words = ['<unk>', '<s>', '</s>', *(f'<0x{n:02X}>' for n in range(256)), *letters]
  merges = [('l', 'o'), ('▁', 'h'), ('▁h', 'e'), ('а', 'б'), ('▁', '▁')]
  words += [a + b for a, b in merges]
  model = models.BPE(
    {word: n for n, word in enumerate(words)},
    merges,
    unk_token='<unk>',
    byte_fallback=True,
    fuse_unk=True,
  )
  made = tokenizers.Tokenizer(model)
  made.normalizer = normalizers.Sequence(  # pyright: ignore
    [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')]
  )
  made.decoder = decoders.Sequence(  # pyright: ignore
    [
      decoders.Replace('▁', ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(' ', 1, 0),
    ]
  )
  made.add_special_tokens(['<unk>', '<s>', '</s>'])
  made.add_tokens([tokenizers.AddedToken('▁▁', normalized=False)])  # as Gemma's
  return made


def _saved(folder, made, **beside):
  made.save(str(folder / 'tokenizer.json'))
  for name, content in beside.items():
    (folder / f'{name}.json').write_text(json.dumps(content))
  return str(folder)


def _open(*args, **changes):
  return HuggingFace.Config(_saved(*args), **changes).build([])


def test_a_file_is_read_as_the_library_reads_it(tmp_path):
  made = _byte_level()
  made.post_processor = processors.TemplateProcessing(  # pyright: ignore
    single='<s> $A </s>', special_tokens=[('<s>', 0), ('</s>', 1)]
  )
  assert made.encode('a').ids[0] == 0  # with the tokens that are not wanted here
  folder = _saved(tmp_path, made)
  built = HuggingFace.Config(folder).build([])
  assert built == HuggingFace.Config(f'{folder}/tokenizer.json').build([])
  assert built.vocab_size == made.get_vocab_size() == 320
  assert (built.end, built.special) == (None, {})
  for text in [*TEXTS, 'a</s> b<s>']:
    ids = made.encode(text, add_special_tokens=False).ids
    assert built.encode(text).tolist() == ids
    assert built.decode(ids) == text
  assert built.encode('</s>').tolist() == [1]  # spelt, it is the token


def test_nothing_is_cut_padded_or_dropped(tmp_path):
  made = _byte_level()
  plain = made.encode(TEXTS[4]).ids
  made.enable_truncation(4)
  made.enable_padding(length=99)
  folder = _saved(tmp_path, made)
  path = tmp_path / 'tokenizer.json'
  content = json.loads(path.read_text('utf-8'))
  content['model']['dropout'] = 0.5
  path.write_text(json.dumps(content))
  built = HuggingFace.Config(folder).build([])
  assert [built.encode(TEXTS[4]).tolist() for _ in range(5)] == [plain] * 5


CONFIG = {'bos_token': {'content': '<s>'}, 'eos_token': None, 'pad_token': '<none>'}
MAP = {'eos_token': '</s>', 'bos_token': '<pad>'}
IDS = {'eos_token_id': [0, 1], 'pad_token_id': 2, 'bos_token_id': True}


@pytest.mark.parametrize(
  ('beside', 'end', 'special'),
  [
    ({}, None, {}),
    ({'tokenizer_config': CONFIG}, None, {'begin': 0}),
    ({'special_tokens_map': MAP}, None, {'begin': 2, 'end': 1}),
    ({'generation_config': IDS}, None, {'end': 0, 'pad': 2}),
    (
      {'tokenizer_config': CONFIG, 'special_tokens_map': MAP, 'generation_config': IDS},
      None,
      {'begin': 0, 'end': 1, 'pad': 2},
    ),
    ({'special_tokens_map': MAP}, '<pad>', {'begin': 2, 'end': 2}),
    ({}, 'Ġ', {'end': _byte_level().token_to_id('Ġ')}),
    ({'tokenizer_config': {'eos_token': '<eos>'}}, '</s>', {'end': 1}),
    ({'generation_config': {'pad_token_id': -1, 'unk_token_id': 999}}, None, {}),
  ],
)
def test_roles_of_special_tokens(tmp_path, beside, end, special):
  built = HuggingFace.Config(_saved(tmp_path, _byte_level(), **beside), end).build([])
  assert (built.special, built.end) == (special, special.get('end'))


@pytest.mark.parametrize(
  ('beside', 'end', 'match'),
  [
    ({}, '<s', r"tokenizer.end='<s' is no token .*did you mean '<s>'"),
    ({}, 'fin', r'choose from: <s>, </s>, <pad>'),
    (
      {'tokenizer_config': {'eos_token': '<eos>'}},
      None,
      r"tokenizer_config.json': the eos token '<eos>' is not in .*set tokenizer.end",
    ),
    ({'generation_config': {'eos_token_id': 320}}, None, r'the eos token 320 is not'),
    ({'special_tokens_map': [1]}, None, r"map.json': not a JSON object"),
  ],
)
def test_an_end_that_is_not_there(tmp_path, beside, end, match):
  config = HuggingFace.Config(_saved(tmp_path, _byte_level(), **beside), end)
  with pytest.raises(DataError, match=match):
    config.build([])


def test_files_that_are_none(tmp_path):
  def fails(match, name=''):
    with pytest.raises(DataError, match=match):
      HuggingFace.Config(f'{tmp_path}/{name}').build([])

  fails('tokenizer.file=.*no tokenizer.json there, only other files; make one with')
  (tmp_path / 'tokenizer.model').write_bytes(b'\x0a')
  fails('only tokenizer.model; make one with transformers')
  fails(r"cannot read '.*none.json': No such file", 'none.json')
  empty = {'model': {'type': 'BPE', 'vocab': {}, 'merges': []}}
  for text, match in {
    '': r'cannot read .*tokenizer.json.: not JSON',
    '{"a": "\udcff"}': 'not JSON',
    '[1]': 'not a JSON object',
    '{}': 'not what a tokenizer.json holds',
    '{"model": {"type": "BPE"}}': 'not what a tokenizer.json holds',
    '{"model": {"type": "New", "vocab": {}}}': 'not what a tokenizer.json holds',
    json.dumps(empty): 'no token',
  }.items():
    (tmp_path / 'tokenizer.json').write_bytes(text.encode('utf-8', 'surrogateescape'))
    fails(match)


def test_ids_with_holes_and_words_it_does_not_know(tmp_path):
  model = models.WordLevel({'a': 0, 'b': 7, '?': 3}, '?')
  made = tokenizers.Tokenizer(model)
  made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
  built = _open(tmp_path, made)
  assert built.vocab_size == 8
  assert built.encode('b a c').tolist() == [7, 0, 3]
  assert built.decode([7, 5]) == 'b'  # nothing is at 5
  assert built.bytes_per_token[[1, 2, 4, 5, 6]].tolist() == [0] * 5
  for ids, match in (([8], 'id 8 is outside the vocabulary of 8'), ([-1], 'id -1')):
    with pytest.raises(DataError, match=match):
      built.decode(ids)
  made = tokenizers.Tokenizer(models.WordLevel({'a': 0}, 'x'))
  with pytest.raises(DataError, match=r'doc:3: .*use a tokenizer that knows it'):
    _open(tmp_path, made).encode('b', 'doc:3')
  with pytest.raises(DataError, match='byte 0xff at 1 is not UTF-8'):
    built.encode(b'a\xff')
  with pytest.raises(DataError, match=r'U\+D800'):
    built.encode('a\ud800')


def test_byte_counts_of_sentencepiece(tmp_path):
  made = _sentencepiece()
  built = _open(tmp_path, made)
  for text in ('hello world', '  he', 'абв бa', 'zж🙂 hello', 'héllo'):
    ids = built.encode(text)
    assert ids.tolist() == made.encode(text, add_special_tokens=False).ids
    assert built.decode(ids) == text
    # The space that was put before the text is counted, as it is in a token.
    assert tokenizer.num_bytes(built, ids).sum() == len(text.encode()) + 1
  sizes = built.bytes_per_token
  for token, size in {
    '▁he': 3,
    '▁': 1,
    '▁▁': 2,
    'lo': 2,
    'аб': 4,
    '<0xE2>': 1,
    '</s>': 0,
  }.items():
    assert sizes[built.vocabulary[token]] == size


def test_added_tokens_count_as_they_are_spelt(tmp_path):
  made = _byte_level()
  made.add_tokens(['    ', 'Привет'])
  built = _open(tmp_path, made)
  ids = built.encode('x    Привет</s>').tolist()
  assert [built.bytes_per_token[i] for i in ids] == [1, 4, 12, 0]
  assert built.decode(ids) == 'x    Привет</s>'


@pytest.mark.parametrize('make', [_byte_level, _sentencepiece])
def test_bytes_of_tokens_are_what_decoding_writes(tmp_path, make):
  made = make()
  made.add_tokens(['    ', 'Привет'])
  built = _open(tmp_path, made)
  spelt = built.token_bytes
  assert len(spelt) == built.vocab_size
  texts = ('hello world', ' абв бa', 'zж🙂 hello', 'x    Привет</s>', 'e</s>  lo')
  before = built.encode('x')
  for text in texts:
    ids = built.encode(text)
    found = b''.join(spelt[n] for n in ids)
    whole = built.decode(np.concatenate([before, ids]))
    assert whole.encode() == b'x' + found
  if make is _byte_level:  # any bytes, text or not
    rng = np.random.default_rng(0)
    for _ in range(200):
      ids = rng.integers(0, built.vocab_size, 9)
      found = b''.join(spelt[n] for n in ids)
      assert built.decode(ids) == found.decode('utf-8', 'replace')


# Kept and shown


@pytest.mark.parametrize('make', [_byte_level, _sentencepiece])
def test_json_needs_no_file(tmp_path, make):
  config = HuggingFace.Config(_saved(tmp_path, make(), special_tokens_map=MAP), '</s>')
  assert fields.from_json(fields.to_json(config)) == config
  if make is _sentencepiece:
    (tmp_path / 'special_tokens_map.json').unlink()
  built = config.build([])
  text = built.to_json()
  mixed = dict(reversed(built.definition.items()))
  assert HuggingFace(mixed, built.special).to_json() == text  # whatever the order
  for path in tmp_path.iterdir():
    path.unlink()
  again = tokenizer.from_json(text)
  assert again == built and isinstance(again, tokenizer.Tokenizer)
  assert (again.fingerprint, again.to_json()) == (built.fingerprint, text)
  assert (again.end, again.special) == (built.end, built.special)
  assert again.encode(TEXTS[4]).tolist() == built.encode(TEXTS[4]).tolist()
  assert again.fingerprint != HuggingFace(built.definition, {}).fingerprint
  for broken in (
    {**json.loads(text), 'special': {'pad': 9999}},
    {**json.loads(text), 'more': 1},
    {'kind': 'huggingface'},
    {**json.loads(text), 'definition': 5},
  ):
    with pytest.raises(DataError):
      tokenizer.from_json(json.dumps(broken))


def test_a_trained_one_is_kept_too(bpe):
  again = tokenizer.from_json(bpe.to_json())
  assert again == bpe and again.fingerprint == bpe.fingerprint
  assert type(fields.from_json(fields.to_json(Bpe.Config(end=None)))) is Bpe.Config


def _crossing():
  """Every token ends inside a character: э and ю as bytes 2+1, 2+1, …"""
  made = _plain()
  spell = {byte: character for character, byte in _bytes_of().items()}
  a, b, c = (spell[byte] for byte in 'э'.encode() + 'ю'.encode()[1:])
  words = [*sorted(_bytes_of()), b + a, c + a]
  made.model = models.BPE(  # pyright: ignore
    {word: n for n, word in enumerate(words)}, [(b, a), (c, a)]
  )
  return made


@pytest.mark.parametrize('make', [_byte_level, _sentencepiece, _crossing])
@pytest.mark.parametrize(
  'text', ['эюэюэюэюэю', 'hello he абв', '🙂🙂 ж', 'a\ufffd\ufffd\ufffd\ufffdb', ' ']
)
def test_a_stream_shows_whole_characters_as_soon_as_they_are(tmp_path, make, text):
  built = _open(tmp_path, make())
  prompt = built.encode('he')
  whole = 'he' + text
  ids = built.encode(whole)[len(prompt) :]
  assert built.decode(np.concatenate([prompt, ids])) == whole
  marks = np.arange(len(ids)) % 2 == 0
  before = ''
  for end in range(len(ids) + 1):
    parts = pieces(built, ids[:end], marks[:end], False, prompt)
    shown = ''.join(part for part, _ in parts)
    size = tokenizer.num_bytes(built, ids[:end]).sum()
    so_far = text.encode()[:size].decode('utf-8', 'ignore')
    assert shown == so_far.rstrip('\ufffd')  # what ends with one may be unfinished
    assert shown.startswith(before)
    before = shown
    last = ''.join(
      part for part, _ in pieces(built, ids[:end], marks[:end], True, prompt)
    )
    assert last.startswith(so_far)
  assert last == text
  assert all(a[1] != b[1] for a, b in itertools.pairwise(parts))
