"""Our tables as the database sees them."""

from __future__ import annotations

CATALOG = """
    with ours as (select * from pg_class where relname like '%ecord%' and relkind = 'r')
    select 'table', relnamespace::regnamespace || '.' || relname,
           concat(array_to_string(reloptions, ' '), ' ', obj_description(oid, 'pg_class'))
      from ours
    union all
    select 'column', relname || '.' || attname,
           concat_ws(' ', format_type(atttypid, atttypmod), attnotnull,
                     col_description(attrelid, attnum))
      from ours join pg_attribute on attrelid = ours.oid where attnum > 0
    union all
    select 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
      from ours join pg_index on indrelid = ours.oid
    order by 1, 2"""
"""Everything that our tables are, the names of their indexes and constraints included."""
