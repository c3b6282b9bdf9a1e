"""Adapter files: PEFT LoRA folders to packed host arrays and back."""

from lorajax.adapters.explain import Explanation as Explanation
from lorajax.adapters.explain import explain as explain
from lorajax.adapters.load import adapter_from_tensors as adapter_from_tensors
from lorajax.adapters.load import load_adapter as load_adapter
from lorajax.adapters.names import check_name as check_name
from lorajax.adapters.peft_file import LoraModule as LoraModule
from lorajax.adapters.peft_file import PeftAdapter as PeftAdapter
from lorajax.adapters.peft_file import read_peft as read_peft
from lorajax.adapters.save import save_adapter as save_adapter
