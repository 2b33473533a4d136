//! The login: passwords from the environment, certificates from files.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use holdfast_client::Locks;
use holdfast_client::redis::{ClientTlsConfig, TlsCertificates};

use crate::args::Target;
use crate::failure::Failure;

/// A client of these servers.
pub fn open(target: &Target) -> Result<Locks, Failure> {
    let url = with_passwords(&target.url, target.password.as_deref(), target.sentinel_password.as_deref());
    let client_tls = match (&target.tls_cert, &target.tls_key) {
        (Some(cert), Some(key)) => Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? }),
        (None, None) if target.tls_ca.is_none() => return Ok(Locks::open(&url)?),
        (None, None) => None,
        _ => return Err(Failure::usage("--tls-cert and --tls-key need each other")),
    };
    let root_cert = target.tls_ca.as_deref().map(read).transpose()?;
    Ok(Locks::open_with_certificates(&url, TlsCertificates { client_tls, root_cert })?)
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(file).map_err(|error| Failure::of(&file.display().to_string(), &error, "use a readable PEM file"))
}

/// The address with these passwords, if it has none itself.
fn with_passwords(url: &str, password: Option<&OsStr>, sentinel: Option<&OsStr>) -> String {
    let given = |password: Option<&OsStr>| password.filter(|it| !it.is_empty()).map(encoded);
    let url = match given(password) {
        Some(password) => with_password(url, &password),
        None => url.to_owned(),
    };
    match given(sentinel) {
        Some(password) if url.contains("+sentinel://") && !url.contains("sentinel_password=") => {
            let mark = if url.contains('?') { '&' } else { '?' };
            format!("{url}{mark}sentinel_password={password}")
        }
        _ => url,
    }
}

fn with_password(url: &str, password: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    if scheme.contains("unix") {
        let mark = if rest.contains('?') { '&' } else { '?' };
        return if rest.contains("pass=") { url.to_owned() } else { format!("{url}{mark}pass={password}") };
    }
    // A path or an option may contain an @, too.
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (hosts, path) = rest.split_at(end);
    match hosts.rsplit_once('@') {
        Some((login, _)) if login.contains(':') => url.to_owned(),
        Some((user, hosts)) => format!("{scheme}://{user}:{password}@{hosts}{path}"),
        None => format!("{scheme}://:{password}@{hosts}{path}"),
    }
}

/// Percent-encodes a part of a URL.
fn encoded(text: &OsStr) -> String {
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.as_bytes()
        .iter()
        .map(|&byte| if safe(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_comes_from_environment_when_address_has_none() {
        let with = |url| with_passwords(url, Some("p:@/%ä".as_ref()), None);
        assert_eq!(with("redis://host:1/2"), "redis://:p%3A%40%2F%25%C3%A4@host:1/2");
        assert_eq!(with("rediss://locker@host"), "rediss://locker:p%3A%40%2F%25%C3%A4@host");
        assert_eq!(with("redis+cluster://a:1,b:2"), "redis+cluster://:p%3A%40%2F%25%C3%A4@a:1,b:2");
        assert_eq!(with("unix:///run/socket"), "unix:///run/socket?pass=p%3A%40%2F%25%C3%A4");
        for as_it_is in ["redis://u:p@host", "redis://:p@host/1", "unix:///s?user=u&pass=p", "nonsense"] {
            assert_eq!(with(as_it_is), as_it_is);
        }
        assert_eq!(with_passwords("redis://host", Some("".as_ref()), None), "redis://host");
    }

    #[test]
    fn sentinels_have_their_own_password() {
        let with = |url| with_passwords(url, None, Some("s".as_ref()));
        assert_eq!(with("redis+sentinel://a/m"), "redis+sentinel://a/m?sentinel_password=s");
        assert_eq!(
            with("redis+sentinel://a/m?sentinel_user=u"),
            "redis+sentinel://a/m?sentinel_user=u&sentinel_password=s"
        );
        assert_eq!(with("redis+sentinel://a/m?sentinel_password=x"), "redis+sentinel://a/m?sentinel_password=x");
        assert_eq!(with("redis://a"), "redis://a");
    }
}
