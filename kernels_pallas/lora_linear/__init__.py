"""`lora_linear`: `api` chooses and checks, the other modules compute."""

from lorajax.kernels_pallas.lora_linear.api import lora_linear as lora_linear
