"""The sample command, as a person and as a program use it."""

import contextlib
import json
import os
import pty
import subprocess

import pytest
from runs import assert_mistake, command_line, ended_well, environment


@pytest.fixture(scope='module')
def sample(place, train, straight):
  def run(*args, **env):
    return train(
      '', f'--checkpoint={straight}', '--tokens=24', *args, command='sample', **env
    )

  return run


def test_one_prompt_streams_and_ends_with_the_figures(sample):
  done = ended_well(sample('--prompt=one module'))
  text, figures = done.stdout.split('\n\n')
  assert text.startswith('one module') and len(text) > len('one module')
  for said in ('24 tokens in', 'tokens a pass', 'tokens/s', 'acceptance length τ'):
    assert said in figures, figures
  assert 'acceptance by position' in figures and 'step 20' in figures
  assert '\033' not in done.stdout


def test_json_agrees_with_itself_and_with_plain_decoding(sample, place):
  (place / 'prompts.txt').write_text('one module\nthe token\r\nnext')
  out = place / 'out.json'
  args = (f'--prompts={place}/prompts.txt', f'--json={out}')
  done = ended_well(sample(*args))
  found = json.loads(out.read_text())
  texts = [one['text'] for one in found['completions']]
  assert [one['prompt'] for one in found['completions']] == [
    'one module',
    'the token',
    'next',
  ]
  for one, text in zip(found['completions'], texts, strict=True):
    assert one['prompt'] + text in done.stdout
    assert ''.join(piece['text'] for piece in one['pieces']) == text
    assert len(one['tokens']) == len(one['logprobs']) == 24
  assert found['delivered'] == 72 and found['tau'] >= 1
  assert found['draft'] == 2 and found['compilations'] == 1
  # Plainly, two texts of each prompt, through a queue.
  queue = ('--throughput', '--samples=2', '--rows=2', '--cache=bfloat16')
  ended_well(sample(*args, '--draft=0', *queue))
  plain = json.loads(out.read_text())
  assert [one['text'] for one in plain['completions']] == [
    text for text in texts for _ in range(2)
  ]
  seeds = [one['settings']['seed'] for one in plain['completions']]
  assert seeds[::2] == [0, 1, 2] and len(set(seeds)) == 6
  assert plain['cache'] == 'bfloat16' and found['cache'] is None
  assert plain['tau'] == 1.0 and plain['tokens_per_pass'] == 1.0


def test_json_on_standard_output_is_nothing_else(sample, place):
  lines = ['"one"', json.dumps({'prompt': 'a\nmodule', 'budget': 9})]
  (place / 'prompts.jsonl').write_text('\n'.join(lines) + '\n')
  args = ('--temperature=1', '--seed=5', '--stop=e', '--json=-')
  done = ended_well(sample(f'--prompts={place}/prompts.jsonl', *args))
  found = json.loads(done.stdout)
  assert [one['prompt'] for one in found['completions']] == ['one', 'a\nmodule']
  assert [one['settings']['budget'] for one in found['completions']] == [24, 9]
  assert [one['settings']['seed'] for one in found['completions']] == [5, 6]
  for one in found['completions']:
    assert one['finish_reason'] in ('stop', 'length')
    assert len(one['tokens']) <= one['settings']['budget']
    assert 'e' not in one['text'][:-1]
    assert (one['finish_reason'] == 'stop') == one['text'].endswith('e')


def test_processors_and_stop_strings_of_flags_and_of_a_prompt(sample, place):
  lines = [
    {'prompt': 'one'},
    {'prompt': 'one', 'stop_strings': [], 'logit_bias': {'101': '-inf'}},
    {'prompt': 'one', 'min_tokens': 9, 'stop_strings': ['e', ' ']},
  ]
  (place / 'own.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  args = ('--temperature=1', '--frequency_penalty=0.5', '--stop_string=e', '--json=-')
  done = ended_well(sample(f'--prompts={place}/own.jsonl', '--logit_bias=32:2', *args))
  first, banned, late = json.loads(done.stdout)['completions']
  assert first['settings']['logit_bias'] == [[32, 2.0]]
  assert first['settings']['frequency_penalty'] == 0.5
  assert 'e' not in first['text'] and 'e' not in banned['text']
  assert len(banned['tokens']) == 24 and len(late['tokens']) > 9
  assert late['finish_reason'] == 'stop'
  assert set('e ') & set(bytes(late['tokens'][-1:]).decode('utf-8', 'replace'))


def test_accepted_drafts_are_underlined_on_a_terminal(place, straight):
  ours, theirs = pty.openpty()
  args = (f'--checkpoint={straight}', '--tokens=60', '--prompt=one module predicts ')
  env = {k: v for k, v in environment(place).items() if k != 'NO_COLOR'}
  start = command_line(place, '', *args, command='sample')
  with subprocess.Popen(start, env=env, cwd=place, stdout=theirs) as done:
    os.close(theirs)
    shown = b''
    with contextlib.suppress(OSError):  # the end of a terminal
      while part := os.read(ours, 4096):
        shown += part
  os.close(ours)
  assert done.returncode == 0
  text = shown.decode().split('\r\n\r\n')[0]
  assert '\033[4m' in text and text.count('\033[4m') == text.count('\033[24m')


@pytest.mark.slow
def test_drafts_that_branch_write_the_same_and_a_lossy_rule_says_so(sample):
  def written(*args):
    done = ended_well(sample('--prompt=one module ', '--json=-', *args))
    return json.loads(done.stdout)

  plain, tree = written('--draft=0'), written('--tree=3x2')
  assert tree['completions'][0]['text'] == plain['completions'][0]['text']
  assert tree['passes'] < plain['passes'] and tree['proposed'] > tree['passes']
  assert (tree['tree'], tree['exact'], plain['tree']) == ('3x2', True, None)
  typical = '--rule=typical', '--temperature=1'
  done = ended_well(sample('--prompt=one module ', *typical))
  assert '--rule=typical is lossy' in done.stdout + done.stderr
  assert not written(*typical)['exact']


@pytest.mark.parametrize(
  'args, said',
  [
    ((), ('--prompt', 'there is no prompt')),
    (('--prompt=',), ('prompts[0]', 'empty')),
    (('--prompts=nowhere.txt',), ('nowhere.txt', 'cannot be read')),
    (('--prompt=a', '--temperature=-1'), ('--temperature = -1',)),
    (('--prompt=a', '--tokens=-1'), ('--tokens = -1',)),
    (('--prompt=a', '--draft=9'), ('--draft = 9', '0 … 2')),
    (('--prompt=a', '--cache=int4'), ('--cache = ', 'int4', 'bfloat16 or int8')),
    (('--prompt=a', '--samples=0'), ('--samples = 0', 'at least 1')),
    (('--prompt=a', '--rule=hope'), ('--rule = ', 'hope', 'rejection')),
    (('--prompt=a', '--stop=ab'), ('--stop', '2 tokens', '--stop_string=ab')),
    (('--prompt=a', '--stop_string='), ("--stop_string = ''", 'is empty')),
    (('--prompt=a', '--min_tokens=25'), ('--min_tokens = 25', 'the budget of 24')),
    (('--prompt=a', '--repetition_penalty=0'), ('--repetition_penalty = 0', 'off')),
    (('--prompt=a', '--logit_bias=x:1'), ('--logit_bias', 'x:1', '17:-1.5')),
    (('--prompt=a', '--logit_bias=999:1'), ('--logit_bias = 999', 'use ids in 0')),
    (('--prompt=a', '--tree=3x2x1'), ('--tree = ', '3 deep')),
    (('--prompt=a', '--tree=2', '--rule=block'), ('--rule = ', 'chains only')),
    (('--prompt=a', '--draft_cost=-1'), ('--draft_cost = -1',)),
    (('--prompt=a', '--longest=20'), ('1 tokens and a budget of 24', 'longest=20')),
    (('--prompt=a', '--json=/proc/none/x'), ('--json', 'cannot be written')),
    (('--prompt=a', '--tempreature=1'), ('--tempreature', 'did you mean')),
  ],
)
@pytest.mark.slow
def test_mistakes_are_one_line(sample, args, said):
  assert_mistake(sample(*args), *said)


def test_a_blank_line_among_prompts_is_named(sample, place):
  (place / 'gap.txt').write_text('one\n\ntwo\n')
  assert_mistake(sample(f'--prompts={place}/gap.txt'), 'gap.txt:2', 'empty')


def test_an_unknown_setting_of_a_prompt_is_refused(sample, place):
  (place / 'typo.jsonl').write_text('{"prompt": "a", "tempreature": 1}\n')
  said = ('typo.jsonl:1', 'tempreature', "did you mean 'temperature'")
  assert_mistake(sample(f'--prompts={place}/typo.jsonl'), *said)
