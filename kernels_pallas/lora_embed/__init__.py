"""`lora_embed`: `api` chooses and checks, `xla` computes."""

from lorajax.kernels_pallas.lora_embed.api import lora_embed as lora_embed
from lorajax.kernels_pallas.lora_embed.xla import embedded as embedded
