-- Written by 0.1.0.
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x22d85b250e7e4e4e4a6ea57d132a425bd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '6', '200', 'completed', 'jAz/xYkk/Hi5', 'bytes', E'\\xb923c2f515471d08bc8cc9e11810ec1d76c7e29278f6e174', NULL, E'\\x01b923c2f515471d08238f3e6cfd1c01389c58f36705ae473eb4215d5277b0de5ee723fc9ca57ca93033f9e8fbee1e35ebf5554a1355c81b268a68e781c3c4ed6f104068e7b513512991397919bd33f37a435ab652bbda86b736ae16277b489ff98f0d0351c50c6433df0c63535aab234d60b5831e3bcc48668ac69c50e74c4f');
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x4da35eb7de29cf5dc63334f9254e1e7bd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '1', '500', 'failed', 'XsKTST3MyD0d', 'failed', E'\\xb923c2f515471d08b2298f94424ab01f8915795018a602da', NULL, E'\\x01b923c2f515471d084c0a705ee3870f227699c4fc5d2816a88ed78bc7368313f60affc993d7b5bee13a2e6e369171cf95bceaddad5138d4292ccd15d3933306113f1c2934e0248b5df4065cfb55fdba5dcf2f0555dd4a5b2f09b88f02dc65481e65bc661f3945fa5161bc1d164e88644735d53fb1e0e9');
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x91f446190ab306d56e7f0cd63dac082ed52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', NULL, '2026-11-22 12:01:00+00', '1', '1', NULL, 'in_progress', 'ABCz7mlsDltz', 'interrupted', E'\\xb923c2f515471d08fdf6382cf00928d0a0389345ca0c611d', NULL, NULL);
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x56ff23e7a887e902ae8de2fdec1cc25fd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '5', '201', 'completed', 'uQbXOR6lt6mi', 'json', E'\\xb923c2f515471d08ad59d8e9fb6756554d531d2a8abdf883', NULL, E'\\x01b923c2f515471d08711db869e478991396a5194da5531f39fe4c8ffa3eb8c30b23e96626966d9348fd1d5bc07a6b85f99c0f4f5b777ee6c3b34b7bfdd7c250067aab5c90cb81f4c8ef8a168b78246204c9e767d3c76995ce47d7ff0bed6a387faa196bafc777570d08a649b7a04ece');
UPDATE idempotency_record SET steps = '{"step": {"attempt": 1, "at": "2026-11-22 12:00:00.000000", "result": "sealed:AbkjwvUVRx0I2Uzsux/EH0FcXCExIRWk6EeUyQVCxPVfD9jkmUliprjjeVWKI68K2yMuGwjxzz8tQA=="}}'
 WHERE key = E'\\x91f446190ab306d56e7f0cd63dac082ed52231cfd98026';
