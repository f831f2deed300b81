"""The reference: FlashMLA's decode path in torch on a CPU.

Written from the public sources (sgl-project/FlashMLA, branches ``sgl`` abb5477 and ``rebase``
df022eb; deepseek-ai/FlashMLA 9241ae3), none of which is copied here. One file per subject:

* ``gpu`` the card that is imitated, ``words`` what a refusal says,
* ``check_plan``, ``check_sparse``, ``check_dense`` the argument checks, in order,
* ``schedule`` the metadata kernel, integer for integer,
* ``kv_format`` the FP8 pages, ``attention`` partial results and their combination,
* ``kernel`` the whole behind the common interface.
"""
