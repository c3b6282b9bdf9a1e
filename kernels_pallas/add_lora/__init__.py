"""`add_lora`: `api` chooses and checks, the other modules compute."""

from lorajax.kernels_pallas.add_lora.api import add_lora as add_lora
