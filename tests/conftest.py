"""Eight simulated CPU devices, strict promotion, and shapes checked by beartype."""

import importlib
import os
import pkgutil

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)
os.environ.setdefault('MPLBACKEND', 'agg')

import jax
from jaxtyping import install_import_hook

pytest_plugins = ['runs', 'stored', 'updates']  # their fixtures

jax.config.update('jax_numpy_rank_promotion', 'raise')
# Most of the suite's time is compilation of what runs once.
jax.config.update('jax_disable_most_optimizations', True)

with install_import_hook('mtpjax', 'beartype.beartype'):
  import mtpjax

  for module in pkgutil.walk_packages(mtpjax.__path__, 'mtpjax.'):
    importlib.import_module(module.name)
