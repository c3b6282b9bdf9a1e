"""Reference decoders in flax NNX, and their prefill and decode steps."""

from lorajax.models.cache import KVCache as KVCache
from lorajax.models.cache import init_cache as init_cache
from lorajax.models.config import ModelConfig as ModelConfig
from lorajax.models.decoder import Decoder as Decoder
from lorajax.models.load import from_tensors as from_tensors
from lorajax.models.load import load_model as load_model
from lorajax.models.merge import merge_adapters as merge_adapters
from lorajax.models.placement import abstract_cache as abstract_cache
from lorajax.models.placement import abstract_model as abstract_model
from lorajax.models.placement import on_devices as on_devices
from lorajax.models.placement import param_shardings as param_shardings
from lorajax.models.steps import decode as decode
from lorajax.models.steps import prefill as prefill
