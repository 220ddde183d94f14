"""Wait for a program to be copied to a path, make folders, and become it: become.py PATH FOLDER,… ARGUMENT…"""

import os
import sys
import time
from pathlib import Path

program, folders, *arguments = sys.argv[1:]
for each in folders.split(","):
    Path(each).mkdir(parents=True, exist_ok=True)
while not os.access(program, os.X_OK):
    time.sleep(0.1)
os.execv(program, [program, *arguments])
