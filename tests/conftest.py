"""Eight simulated CPU devices, strict promotion, and shapes checked by beartype."""

import importlib
import os
import pkgutil
import tempfile

from forks import FLAGS

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + f' --xla_force_host_platform_device_count=8 {FLAGS}'
)
os.environ.setdefault('MPLBACKEND', 'agg')

import jax
import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

pytest_plugins = ['runs', 'stored', 'updates']  # their fixtures

jax.config.update('jax_numpy_rank_promotion', 'raise')
# Most of the suite's time is compilation of what runs once.
jax.config.update('jax_disable_most_optimizations', True)
# What several tests compile is compiled once.
compiled = tempfile.TemporaryDirectory(prefix='mtpjax-tests-')
jax.config.update('jax_compilation_cache_dir', compiled.name)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)

with install_import_hook('mtpjax', 'beartype.beartype'):
  import mtpjax

  for module in pkgutil.walk_packages(mtpjax.__path__, 'mtpjax.'):
    importlib.import_module(module.name)


@pytest.fixture
def unchecked():
  """Types as a user may get them wrong: the tests' own checks would come first."""
  jaxtyping_config.update('jaxtyping_disable', True)
  yield
  jaxtyping_config.update('jaxtyping_disable', False)
