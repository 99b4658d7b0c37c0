"""A bucket on this machine: what gcsfs and TensorStore take for Google's."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from urllib.parse import quote


class Bucket:
  """gs://bucket, in a process of its own; `env` leads the clients to it.

  What it holds is read with HTTP alone, not with what wrote it.
  """

  def __init__(self, log):
    with socket.socket() as one:
      one.bind(('127.0.0.1', 0))
      port = one.getsockname()[1]
    program = 'import gcp_storage_emulator.__main__ as m; m.main()'
    options = ['--host=127.0.0.1', f'--port={port}', '--in-memory']
    self._server = subprocess.Popen(
      [sys.executable, '-c', program, 'start', *options, '--default-bucket=bucket'],
      stdout=log,
      stderr=log,
    )
    self._url = f'http://127.0.0.1:{port}'
    self.env = {
      'STORAGE_EMULATOR_HOST': self._url,
      'TENSORSTORE_GCS_HTTP_URL': self._url,
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'any',
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # asks Google itself
    }
    end = time.monotonic() + 30
    while True:
      try:
        self.names()
        return
      except urllib.error.URLError:
        if time.monotonic() > end:
          raise
        time.sleep(0.1)

  def _get(self, path):
    with urllib.request.urlopen(f'{self._url}/storage/v1/b/bucket/o{path}') as reply:
      return reply.read()

  def names(self, prefix=''):
    found = json.loads(self._get(f'?prefix={quote(prefix, safe="")}'))
    return sorted(x['name'] for x in found.get('items', []))

  def read(self, name):
    return self._get(f'/{quote(name, safe="")}?alt=media')

  def write(self, name, data):
    query = f'uploadType=media&name={quote(name, safe="")}'
    address = f'{self._url}/upload/storage/v1/b/bucket/o?{query}'
    kind = {'Content-Type': 'application/octet-stream'}
    request = urllib.request.Request(address, data, kind, method='POST')
    urllib.request.urlopen(request).close()

  def copy(self, prefix, folder):
    """All below the prefix, into a local folder."""
    for name in self.names(f'{prefix}/'):
      path = folder / name.removeprefix(f'{prefix}/')
      if not name.endswith('/'):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.read(name))

  def close(self):
    self._server.kill()
    self._server.wait()
