# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the models, one room per op.

Owns: nothing itself; importing the package imports no op, so that a scheduler process can walk past it.
Never: imports vllm, reads configuration, or knows what a request is.
Order: reference first, HPU variant second, both behind one signature in `registry.py`.
"""
