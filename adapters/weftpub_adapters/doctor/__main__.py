"""`python -m weftpub_adapters.doctor`: the doctor alone, installed or not."""

import sys

from weftpub import cli
from weftpub_adapters.doctor.command import doctor

if __name__ == "__main__":
    sys.exit(cli.run(["doctor", *sys.argv[1:]], commands={"doctor": doctor}))
