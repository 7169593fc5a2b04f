"""python -m collx doctor: gathers facts about this machine, runs collx on it, and reports findings.

`machine` and `gpus` gather facts in this process. `ranks` starts the ranks and gathers their facts.
`judge` derives the findings from the facts only.
"""
