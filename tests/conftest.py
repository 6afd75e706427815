import os

# Some virtual machines announce AMX and fault on its first instruction, in PyTorch's own bf16 matmul. Results do not
# depend on it, so tests run without; oneDNN reads this at its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
