"""`lora_delta`: `api` chooses and checks, the other modules compute."""

from lorajax.kernels_pallas.lora_delta.api import lora_delta as lora_delta
