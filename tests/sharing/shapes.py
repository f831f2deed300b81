"""Shapes of what a stranger should not read, and what only looks like it.

The values are made up: each has the form its maker documents, or the form a report showed.
"""

from __future__ import annotations

from typing import NamedTuple


class Secret(NamedTuple):
    """A text as it would stand in a message, and the part of it that must not be in a file."""

    text: str
    core: str


def _same(*texts: str) -> list[Secret]:
    return [Secret(text, text) for text in texts]


_RANDOM = "q7Zk2Lx9Vb4Nm1Tr8Wc5"

SECRETS = [
    # Tokens of services.
    *_same(
        "sk-proj-9aB8cD7eF6gH5iJ4kL3m",
        "sk-ant-api03-aB3dE6gH9jK2mN5pQ8rS",
        "sk-abcdefghijklmnop",
        "hf_AbCdEfGhIjKlMnOpQrStUvWx",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "gho_0123456789abcdefghijABCDEFGHIJ012345",
        "github_pat_11ABCDEFG0abcdefghij_KLMNOPQRSTUV",
        "glpat-aB3dE6gH9jK2mN5pQ8rS",
        "xoxb-123456789012-abcdefGHIJKL",
        "xapp-1-A0123-456-abcdef0123",
        "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
        "ya29.a0AfH6SMBx1y2z3",
        "GOCSPX-aB3dE6gH9jK2mN5pQ8rS",
        "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
        "rk_test_4eC39HqLyjWDarjtT1zdp7dc",
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "npm_aB3dE6gH9jK2mN5pQ8rSaB3dE6gH9jK2mN5p",
        "pypi-AgEIcHlwaS5vcmcCJDk0aB3dE6gH",
        "nvapi-aB3dE6gH9jK2mN5pQ8rS_uV1",
        "dckr_pat_aB3dE6gH9jK2mN5pQ8rS",
        "shpat_0123456789abcdef0123456789abcdef",
        "SG.aB3dE6gH9jK2mN5p.Q8rSaB3dE6gH9jK2mN5pQ8rSaB3dE6gH",
        "hvs.CAESIaB3dE6gH9jK2mN5pQ8rS",
        "gsk_aB3dE6gH9jK2mN5pQ8rSaB3dE6gH",
        "dop_v1_0123456789abcdef0123456789abcdef",
        "glsa_aB3dE6gH9jK2mN5pQ8rS_0a1b2c3d",
        "AGE-SECRET-KEY-1QQPQQPQQPQQPQQPQQPQQPQQPQ",
        "0123456789abcdef0123456789abcdef-us12",
        "110201543:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw0",
        "MTk4NjIyNDgzNDcxOTI1MjQ4.Cl2FMQ.ZnCjm1XVW7vRze4b7Cq4se7kKWs",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVPmB92K27uhbUJU1p1r",
        "a8Fk29dLq0Zx7Vb3nM1pQw5T",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "GPU-6f0b2a1c-9d3e-4b57-8a61-0c2d4e6f8a90",
    ),
    # Headers and schemes.
    Secret("Authorization: Bearer correct-horse-7", "correct-horse-7"),
    Secret("authorization: Basic dXNlcjpodW50ZXIy", "dXNlcjpodW50ZXIy"),
    Secret("Basic dXNlcjpodW50ZXIy", "dXNlcjpodW50ZXIy"),
    Secret("Bearer abcdefgh12345678", "abcdefgh12345678"),
    Secret("Proxy-Authorization: Digest username=horse7", "horse7"),
    Secret("Cookie: session=horse-battery; id=7", "horse-battery"),
    Secret("X-Api-Key: correct-horse-7", "correct-horse-7"),
    # Under a name.
    Secret("password=hunter2horse", "hunter2horse"),
    Secret("pass=hunter2horse", "hunter2horse"),
    Secret("pw=hunter2horse", "hunter2horse"),
    Secret("pwd=hunter2horse", "hunter2horse"),
    Secret("passwd: hunter2horse", "hunter2horse"),
    Secret("api_key='hunter2horse'", "hunter2horse"),
    Secret("--api-key hunter2horse", "hunter2horse"),
    Secret("--hf-token=hunter2horse", "hunter2horse"),
    Secret("HF_TOKEN=hunter2horse", "hunter2horse"),
    Secret('{"credentials": {"user": "horseuser", "x": "hunter2horse"}}', "hunter2horse"),
    Secret("{'auth': ['horseuser', {'x': 'hunter2horse'}]}", "hunter2horse"),
    Secret('{\\"access_token\\": \\"hunter2horse\\"}', "hunter2horse"),
    Secret("token => hunter2horse", "hunter2horse"),
    Secret("the password is hunter2horse", "hunter2horse"),
    Secret("client_secret%3Dhunter2horse", "hunter2horse"),
    # Signatures, webhooks, connection strings.
    Secret("https://x.blob.core.windows.net/c/b?sv=2022&sig=hunter2%2Bhorse", "hunter2"),
    Secret("sv=2022-11-02&ss=b&sig=hunter2horse%3D", "hunter2horse"),
    Secret("https://hooks.slack.com/services/T0AB/B0CD/hunter2horse", "hunter2horse"),
    Secret("hooks.slack.com/services/T0AB/B0CD/hunter2horse", "hunter2horse"),
    Secret("https://discord.com/api/webhooks/123456/hunter2horse", "hunter2horse"),
    Secret("https://corp.webhook.office.com/webhookb2/hunter2horse", "hunter2horse"),
    Secret("postgresql://horseuser:hunter2horse@db/prod", "hunter2horse"),
    Secret("redis://:hunter2horse@cache:6379/0", "hunter2horse"),
    Secret("horseuser:hunter2horse@models", "hunter2horse"),
    Secret("Server=db;Uid=horseuser;Pwd=hunter2horse;", "hunter2horse"),
    Secret("AccountName=a;AccountKey=hunter2horse==", "hunter2horse"),
    Secret(
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{_RANDOM}\n-----END OPENSSH PRIVATE KEY-----",
        _RANDOM,
    ),
    Secret("-----BEGIN RSA PRIVATE KEY----- MIIEhunterhorse", "MIIEhunterhorse"),
    Secret("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHhorse", "AAAAC3NzaC1lZDI1NTE5AAAAIHhorse"),
    # People and places.
    Secret("horseuser@stables.example", "horseuser"),
    Secret("horseuser@build-7:/srv/x", "horseuser"),
    Secret("10.2.3.4", "10.2.3.4"),
    Secret("192.168.17.42:30000", "192.168.17.42"),
    Secret("2001:db8:85a3::8a2e:370:7334", "2001:db8:85a3"),
    Secret("fe80::1ff:fe23:4567:890a", "fe80::1ff"),
    Secret("00:1b:44:11:3a:b7", "00:1b:44:11:3a:b7"),
    Secret("node7.stables.internal:30000", "stables"),
    Secret("gpu-node-7:30000", "gpu-node-7"),
    Secret("ip-10-0-3-7", "ip-10-0-3-7"),
    Secret("/home/horseuser/models/x", "horseuser"),
    Secret("/mnt/horseteam/run.log", "horseteam"),
    Secret("file:///home/horseuser/x", "horseuser"),
    Secret("~horseuser/x", "horseuser"),
    Secret("~horseuser", "horseuser"),
    Secret("\\\\stables\\horseshare\\x", "stables"),
    Secret("C:\\Users\\horseuser\\x", "horseuser"),
    Secret("https://stables.example/horse/x", "stables"),
    # What somebody asked a model.
    Secret("prompt: tell me about my horse disease", "horse disease"),
    Secret('--prompt "tell me about my horse disease"', "horse disease"),
    Secret("--chat-template 'You are the assistant of Acme'", "assistant of Acme"),
    Secret("passphrase: open sesame hill", "sesame hill"),
    Secret('{"role": "user", "content": "my horse disease"}', "horse disease"),
    Secret("+49 170 1234 5678", "1234 5678"),
]

# Each as it stands in SGLang, in a model hub or in what padtrace writes.
HARMLESS = [
    "d0db9eb8c1a2b3c4d5e6f708192a3b4c5d6e7f80",
    "853b184",
    "0.5.18",
    "0.5.18.post1",
    "v0.5.23",
    "2.8.0+cu128",
    "10.2",
    "12.8.1",
    "fp8_e4m3",
    "sk-learn",
    "sk-learn-contrib",
    "scikit-learn==1.5.2",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
    "zai-org/GLM-5",
    "deepseek-ai/DeepSeek-V3.2-Exp",
    "moonshot/kimi-k2-thinking-int4-20250910-final",
    "meta-llama/Llama-3.1-8B-Instruct",
    "flashmla_kv",
    "flash_mla_with_kvcache",
    "DeepseekSparseAttnMultiStepBackend",
    "init_forward_metadata_replay_cuda_graph_from_precomputed",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "srt/layers/x.py:123",
    "sglang/srt/layers/attention/dsa_backend.py:2834 _forward_flashmla_kv",
    "<frozen importlib._bootstrap>:241 _call_with_frames_removed",
    "threading.local",
    "std::vector",
    "cuda:0",
    "sm_100a",
    "torch.bfloat16",
    "torch.float8_e4m3fn",
    "num_splits must have shape (b+1)",
    "12:34:56",
    "2026-12-01T00:21:21",
    "1795978737580675756",
    "+0.3 s",
    "~10 ms",
    "tok/s",
    "q rows 2/3",
    "round-robin-split",
    "sglang#30296",
    "max_total_tokens=4096",
    "num_key_value_heads: 8",
    "basic functionality",
    "token budget 4096",
    "blake2b:9f86d081884c7d659a2feaa0c55ad015",
    "reference (H200, sgl-kernel-0.4.5)",
    "ceil_align(attn_tp=2) -> 4",
]

SURROUNDINGS = ("{}", "cannot load {} now", '("x": "{}")')
