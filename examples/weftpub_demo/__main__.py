"""`python -m weftpub_demo` is `weftpub demo` without an installed entry point."""

from weftpub_demo.command import main

if __name__ == "__main__":
    main()
