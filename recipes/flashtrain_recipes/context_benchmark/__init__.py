"""One attention layer over several devices: `python -m flashtrain recipe=long-context-benchmark`.

settings.py and case.py say what is measured; contenders.py and peers.py are the implementations (every way in every
layout, and other people's), communication.py a way without its computing. launch.py starts the ranks, ranks.py is what
each of them is, grid.py goes through the cases on all of them at once, and measure.py through one case: errors.py
compares with float64, clock.py times, one_device.py is the same attention on one device. run.py is the whole run, as
the command sees it; tables.py and figures.py show what it found.
"""
