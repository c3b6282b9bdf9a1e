"""What each key of `adapter_config.json` means for serving: read, harmless, or refused by name."""

#: Read by `config.read_config`.
READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "init_lora_weights",
    }
)

#: Without effect on a trained linear adapter: notes about training, and options that matter only
#: together with a field that is refused. `fan_in_fan_out` is how the base stores its weight; A is
#: `[r, d_in]` and B `[d_out, r]` either way.
HARMLESS = frozenset(
    {
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "auto_mapping",
        "lora_dropout",
        "fan_in_fan_out",
        "megatron_config",
        "megatron_core",
        "qalora_group_size",
        "merge_weights",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "ensure_weight_tying",  # of an embedding or head: refused by `peft_file.describe`
        "runtime_config",
    }
)

_TRAIN = "train without it, or merge the adapter into the base model"

#: Fields that change the arithmetic if they are set: (why, remedy).
REFUSED = {
    "use_dora": ("DoRA rescales the base weight", "merge it into the base, or train without it"),
    "modules_to_save": ("full weights of modules are not supported", _TRAIN),
    "lora_bias": ("a bias on B is not supported", "train with lora_bias=false"),
    "target_parameters": ("LoRA on 3-D expert weights is not supported", _TRAIN),
    "trainable_token_indices": ("trained token rows are not supported", _TRAIN),
    "layer_replication": (
        "a model with repeated layers is not the base that is served",
        "write the expanded base model out and train on it",
    ),
    "alora_invocation_tokens": ("activated LoRA (aLoRA) starts mid-sequence", _TRAIN),
    "use_qalora": ("QALoRA pools the input", _TRAIN),
    "use_bdlora": ("BD-LoRA has block-diagonal factors", _TRAIN),
    "kasa_config": ("KaSA truncates the base weight and adds a diagonal", _TRAIN),
    "velora_config": ("VeLoRA is not supported", _TRAIN),
    "monteclora_config": ("MonteCLoRA samples around the weights", _TRAIN),
    "arrow_config": ("Arrow routes each token over several adapters", "serve its experts singly"),
    "enable_lora": (
        "LoRA on a part of a fused weight has other shapes",
        "save it with PEFT >= 0.4",
    ),
}

#: Starts of training that leave the base weight alone (`LoraLayer.update_layer` of PEFT 0.21).
HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})

#: Starts that subtract from the base weight, so that the adapter fits the changed base only.
BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
