"""`python -m octavo.server --model MODEL`: the same as `octavo serve MODEL`, for those who come from the module form.

The one place in this package that knows the command line: it is an entry point, nothing imports it.
"""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
