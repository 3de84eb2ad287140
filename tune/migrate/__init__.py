"""Settings of ours from configs of other libraries, whose words are tables in `peers/`."""

from tune.migrate.migrate import migrate
