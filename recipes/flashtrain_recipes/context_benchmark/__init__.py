"""One attention layer over several devices: `python -m flashtrain recipe=long-context-benchmark`.

contenders.py says what is measured; it and peers.py are the implementations (every way in every layout, and other
people's). launch.py starts the ranks, which go through the cases together; ranks.py is what each of them is, and
measure.py one case on all of them; rows.py: what is found, errors and the same attention on one device. run.py is the
benchmark, as the command sees it, and shows what it found.
"""
