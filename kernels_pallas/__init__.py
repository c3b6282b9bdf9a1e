"""Kernels: arrays in, arrays out, one shard. They know no spec, mesh, name or file."""

from lorajax.kernels_pallas.add_lora import add_lora as add_lora
from lorajax.kernels_pallas.checks import ImplementationError as ImplementationError
from lorajax.kernels_pallas.lora_delta import lora_delta as lora_delta
from lorajax.kernels_pallas.lora_embed import embedded as embedded
from lorajax.kernels_pallas.lora_embed import lora_embed as lora_embed
from lorajax.kernels_pallas.lora_linear import lora_linear as lora_linear
from lorajax.kernels_pallas.routing import Routing as Routing
from lorajax.kernels_pallas.routing import make_routing as make_routing
from lorajax.kernels_pallas.weights import LoraWeights as LoraWeights
