//! Hashes that are almost locks, written by hand: each part is mostly as the module writes it, and sometimes slightly wrong.

use fastrand::Rng;

use super::words::Words;

/// Values for a hold count. The first ones are valid.
const COUNTS: [&[u8]; 9] = [b"1", b"2", b"3", b"0", b"-1", b"01", b"1.0", b"9223372036854775808", b""];
/// Values for `#limit`. The first ones are valid.
const LIMITS: [&[u8]; 8] = [b"0", b"2", b"3", b"1", b"-1", b"00", b"18446744073709551616", b"many"];
/// Remaining ms of a holder's lease, or invalid values.
const LEFT: [i64; 9] = [5, 30, 1_000, 100_000, -5, TOO_FAR, 0, 3_600_000_000_000, i64::MAX / 2];
/// In microseconds this is 2^64 less thirty years, which overflows 64 bits to a time in the past.
const TOO_FAR: i64 = 18_445_744_073_709_551;
const NO_TIMES: [&[u8]; 5] = [b"9999999999999999999", b"", b"-1", b"1e12", b"\xff"];
/// Microseconds from now of a token. An hour ahead is the most that counts.
const AHEAD: [i64; 8] =
    [0, -1_000_000, 1, 3_500_000_000, 3_700_000_000, 86_400_000_000, -1_700_000_000_000_000, 1 << 51];
const NO_TOKENS: [&[u8]; 6] = [b"9007199254740991", b"9007199254740992", b"0", b"-7", b"9223372036854775808", b"token"];
/// One of this many parts is wrong.
const ODD: u32 = 6;

/// Writes almost-locks. Tokens are relative to the newest known one, which is about the server's clock in microseconds.
pub struct NearLocks<'a> {
    pub rng: &'a mut Rng,
    pub owners: &'a [Vec<u8>],
    pub token: i64,
}

impl NearLocks<'_> {
    /// The requests that write a new almost-lock, to be sent in one transaction.
    pub fn lock(&mut self, key: &[u8]) -> Vec<Words> {
        let mut requests = vec![vec![b"DEL".to_vec(), key.to_vec()], self.hash(key)];
        match self.rng.u32(..4) {
            0 => {}
            1 => {
                let left = [5, 30, 200, 60_000][self.rng.usize(..4)];
                requests.push(vec![b"PEXPIRE".to_vec(), key.to_vec(), left.to_string().into_bytes()]);
            }
            2 => {
                let at = self.token / 1_000 + LEFT[self.rng.usize(..6)];
                requests.push(vec![b"PEXPIREAT".to_vec(), key.to_vec(), at.to_string().into_bytes()]);
            }
            _ => {
                let field = self.field();
                requests.push(field_time(self.rng, key, &field));
            }
        }
        requests
    }

    /// The `HSET` of an almost-lock.
    pub fn hash(&mut self, key: &[u8]) -> Words {
        let mut request = vec![b"HSET".to_vec(), key.to_vec()];
        let holders = self.holders();
        let has_limit = self.rng.bool();
        if has_limit {
            request.extend([b"#limit".to_vec(), self.mostly(&LIMITS, 3)]);
        }
        if self.rng.u32(..4) > 0 || holders.is_empty() {
            request.extend([b"#fence".to_vec(), self.token()]);
        }
        for owner in holders {
            let count = self.mostly(&COUNTS, 3);
            // A lock with a limit has details of each holder.
            if has_limit != self.is_odd() {
                request.extend([[b"#@".as_slice(), &owner].concat(), self.details()]);
            }
            request.extend([owner, count]);
        }
        request
    }

    /// A field for such a hash.
    pub fn field(&mut self) -> Vec<u8> {
        let owner = self.owner();
        match self.rng.u32(..5) {
            0 => b"#fence".to_vec(),
            1 => b"#limit".to_vec(),
            2 => [b"#@".as_slice(), &owner].concat(),
            _ => owner,
        }
    }

    fn holders(&mut self) -> Vec<Vec<u8>> {
        let mut holders: Vec<Vec<u8>> = (0..self.rng.u32(..4)).map(|_| self.owner()).collect();
        if self.rng.u32(..20) == 0 {
            let odd: [&[u8]; 4] = [b"", b"#", b"#@", b"#unknown"];
            holders.push(odd[self.rng.usize(..odd.len())].to_vec());
        }
        if self.rng.u32(..40) == 0 {
            holders.push(vec![b'x'; 513]);
        }
        holders
    }

    fn owner(&mut self) -> Vec<u8> {
        self.owners[self.rng.usize(..self.owners.len())].clone()
    }

    fn details(&mut self) -> Vec<u8> {
        let deadline = match self.is_odd() {
            true => NO_TIMES[self.rng.usize(..NO_TIMES.len())].to_vec(),
            false => (self.token / 1_000).saturating_add(LEFT[self.rng.usize(..LEFT.len())]).to_string().into_bytes(),
        };
        let separator: &[u8] = if self.rng.u32(..20) == 0 { b"" } else { b":" };
        [&deadline, separator, &self.token()].concat()
    }

    fn token(&mut self) -> Vec<u8> {
        match self.is_odd() {
            true => NO_TOKENS[self.rng.usize(..NO_TOKENS.len())].to_vec(),
            false => (self.token + AHEAD[self.rng.usize(..AHEAD.len())]).to_string().into_bytes(),
        }
    }

    /// One of the first `right` choices, and sometimes any.
    fn mostly(&mut self, choices: &[&[u8]], right: usize) -> Vec<u8> {
        let below = if self.is_odd() { choices.len() } else { right };
        choices[self.rng.usize(..below)].to_vec()
    }

    fn is_odd(&mut self) -> bool {
        self.rng.u32(..ODD) == 0
    }
}

/// Sets or removes a field's expiry. Servers without field expiry return an error.
pub fn field_time(rng: &mut Rng, key: &[u8], field: &[u8]) -> Words {
    let time = ["1", "10", "40", "1000", "100000"][rng.usize(..5)];
    let mut request = match rng.u32(..5) {
        0 => vec![b"HPERSIST".to_vec(), key.to_vec()],
        1 => vec![b"HPEXPIRE".to_vec(), key.to_vec(), b"0".to_vec()],
        _ => vec![b"HPEXPIRE".to_vec(), key.to_vec(), time.as_bytes().to_vec()],
    };
    request.extend([b"FIELDS".to_vec(), b"1".to_vec(), field.to_vec()]);
    request
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::Server;
    use support::resp::Value;

    /// Some of them are locks to the module, and some are not.
    #[test]
    fn some_generated_hashes_are_valid_locks() {
        if !support::module_path().exists() {
            return support::skip("needs the module");
        }
        let server = Server::start();
        let mut client = server.raw();
        let owners: Vec<Vec<u8>> = (0..6).map(|owner| format!("owner-{owner}").into_bytes()).collect();
        let token = match client.call(&[b"LOCK.ACQUIRE", b"clock", b"owner"]) {
            Value::Int(token) => token,
            other => panic!("{other:?}"),
        };
        let mut rng = Rng::with_seed(7);
        let mut replies = [0; 3];
        for _ in 0..400 {
            let requests = NearLocks { rng: &mut rng, owners: &owners, token }.lock(b"almost");
            client.call_all(&requests);
            let reply = client.call(&[b"LOCK.INFO", b"almost"]);
            replies[match reply {
                Value::ServerError(error) if error.code() == "WRONGTYPE" => 0,
                Value::Nil => 1,
                Value::Array(_) => 2,
                other => panic!("{other:?}"),
            }] += 1;
        }
        assert!(replies.iter().all(|&count| count > 20), "no lock, free, held: {replies:?}");
    }
}
