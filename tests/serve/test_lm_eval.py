"""lm-eval's harness against a live server, beside transformers in the same harness; opt-in.

python -m venv --system-site-packages LM && LM/bin/pip install 'lm-eval[api]==0.4.13'
LM_EVAL=LM/bin/python python -m pytest -m long tests/serve/test_lm_eval.py
"""
