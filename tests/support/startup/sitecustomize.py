"""Let every Python program that the tests start collect garbage more rarely than Python does.

Python finds this module since conftest.py puts its folder into PYTHONPATH. Importing torch makes millions of objects
that stay; with the usual thresholds a quarter of its time goes into collections that find nothing.
"""

import gc

gc.set_threshold(100_000, 50, 100)
